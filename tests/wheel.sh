#!/usr/bin/env bash
# A tenth of the tests on the installed wheel: `make dist-test`, in build/wheel. They come from the source distribution,
# without its package, so that nothing of this folder can be imported.
set -euo pipefail
cd "$(dirname "$0")/.."

# What a wheel could lack: data files, lazy imports, the command, optional libraries, formats.
TESTS=(
  tests/api/test_module.py
  tests/artifacts/test_export.py
  tests/cli
  tests/compat/test_install.py
  tests/compat/test_scripts.py
  tests/step/test_cache.py
  tests/fit/test_shows.py
  tests/golden
  tests/integrations/test_transformers.py
  tests/options
  tests/profiling
  tests/runs/test_manager.py
  tests/state/test_file.py
  tests/test_public_names.py
  tests/test_trainer.py
)

root=$PWD
folder=$root/build/wheel
python=$folder/env/bin/python
rm -rf "$folder"
mkdir -p "$folder/source"
tar --extract --gzip --strip-components 1 --directory "$folder/source" --file dist/ort_trainer-*.tar.gz
rm -r "$folder/source/ort_trainer"
cd "$folder/source"
unset PYTHONPATH
wheel=$(echo "$root"/dist/ort_trainer-*.whl)

# First what the README's command installs, alone.
"$root/.venv/bin/python" -m venv "$folder/env"
$python -m pip install --quiet --constraint constraints.txt "$wheel[cpu]"
$python - "$folder/env" <<'END'
import sys

import torch

import ort_trainer

assert ort_trainer.__file__.startswith(sys.argv[1]), ort_trainer.__file__
description = {"inputs": [("input", ["n", 4]), ("label", ["n"])], "outputs": [("loss", [], True)]}
loss_fn = torch.nn.CrossEntropyLoss()
trainer = ort_trainer.ORTTrainer(torch.nn.Linear(4, 2), description, ort_trainer.optim.AdamConfig(), loss_fn=loss_fn)
losses = [trainer.train_step(torch.eye(4), torch.tensor([0, 1, 0, 1])).item() for _ in range(50)]
assert losses[-1] < losses[0], losses
END
"$folder/env/bin/ort-trainer" --version
"$root/.venv/bin/cyclonedx-py" environment --output-reproducible --pyproject "$root/pyproject.toml" \
  --output-file "${wheel%-py3-none-any.whl}.cdx.json" "$folder/env"

$python -m pip install --quiet --constraint constraints.txt "$wheel[cpu,dev]"
export ORT_TRAINER_CACHE=$folder/exports
$python -m pytest -q -n 2 "${TESTS[@]}"
