// Trains the artifacts of ort_trainer on onnxruntime-web and onnxruntime-node.

export { Checkpoint } from "./checkpoint.js";
export { Module, Optimizer, type Tensors } from "./module.js";
export { CheckpointError } from "./sealed.js";
export { deleteCheckpoint, loadCheckpoint, saveCheckpoint } from "./storage.js";
