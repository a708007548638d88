"""Reads a checkpoint from the standard input and writes it again, for tests that compare the bytes."""

import sys

from ort_trainer.api import CheckpointState

state = CheckpointState.load_checkpoint_from_buffer(sys.stdin.buffer.read())
sys.stdout.buffer.write(CheckpointState.save_checkpoint_to_buffer(state, True))
