"""What a model and its loss read and leave outside tensors, in three parts around ``recorder.py``.

- What watches a run: ``watch.py`` (attributes), ``calls.py`` (functions), ``numbers.py`` (numbers that change), with
  ``rates.py``, ``generators.py`` (random numbers) and ``output.py`` (what is written for people).
- What it has met: ``met.py``, at the places of ``places.py``, with ``values.py``, ``containers.py`` and ``code.py``.
- What is left: ``effects.py`` compares with the copies of ``changes.py``, ``leftovers.py`` encodes what has changed,
  ``beginning.py`` lets another run begin with it, and ``carried.py`` puts it into checkpoints.

``notes.py`` is what an export keeps of all that.
"""
