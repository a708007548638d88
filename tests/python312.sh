#!/usr/bin/env bash
# A few tests on Python 3.12, on onnxruntime-training-cpu and on the stock onnxruntime, in build/python312.
# Says why and does nothing where there is no Python 3.12 on this machine, no room for torch, or no torch; the file
# SKIPPED gets the reason.
set -euo pipefail
cd "$(dirname "$0")/.."

ROOM_KB=$((12 * 1024 * 1024))
TESTS=(
  tests/test_imports.py::test_the_package_imports_nothing_heavy_but_torch
  tests/engine/test_ort.py
  tests/engine/test_installed.py
  tests/train/test_loop.py
  tests/train/test_kernels.py::test_twenty_steps_as_pytorch
  tests/train/test_models.py::test_cnn_with_batch_norm_and_batches_of_any_size
  tests/train/test_models.py::test_transformer_encoder_with_sequences_of_any_length
  tests/export/onnx/test_trainer.py::test_what_save_as_onnx_wrote_trains_on
)

skip() {
  echo "not tested: $1" | tee "${SKIPPED:-/dev/null}"
  exit 0
}

# The one on the path may be a shim of pyenv, which fails where another version is chosen.
find_python() {
  local candidate
  for candidate in "${PYTHON312:-python3.12}" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12.*/bin/python; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
}

folder=build/python312
python=$folder/bin/python
if [ ! -e $folder/.installed ]; then
  found=$(find_python)
  [ -n "$found" ] || skip "there is none on this machine"
  [ "$(df --output=avail --block-size=1K . | tail -n 1)" -ge $ROOM_KB ] || skip "torch needs more disk than is free"
  "$found" -m venv $folder
  # The same as `make setup`, less what examples, benchmarks and linters need.
  $python -m pip install --quiet --constraint constraints.txt torch || skip "pip has no torch for it"
  $python -m pip install --quiet --constraint constraints.txt --editable '.[cpu]' pytest pytest-xdist
  $python -m pip install --quiet --constraint constraints.txt --no-deps --target $folder/stock onnxruntime
  touch $folder/.installed
fi

export ORT_TRAINER_CACHE=$PWD/$folder/exports
$python -m pytest -q "${TESTS[@]}"
PYTHONPATH=$PWD/$folder/stock $python -m pytest -q -m engine "${TESTS[@]}"
