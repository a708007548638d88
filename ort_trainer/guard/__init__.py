"""Does the graph still mean what the model means? Asked once a step."""
