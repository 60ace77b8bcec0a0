# `make demo` trains, saves, reloads and classifies; `make test` runs the tests; `make torture` kills runs and compares their end;
# `make upstream` runs transformers' own tests on our classes; `make peers` loads what timm, torchvision and OpenCLIP build, in an
# environment of its own (several GB). All set up .venv first, once.
PYTHON ?= python3
BIN := .venv/bin
export HF_HUB_DISABLE_TELEMETRY := 1

.PHONY: demo test goldens torture upstream peers style clean

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "hf_vit needs Python 3.11 or newer; make PYTHON=python3.12 demo")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	PYTHONWARNINGS=ignore $(BIN)/pip install --quiet --constraint constraints.txt --editable ".[recipes,export,app]" --group dev
	touch $@

demo: .venv/installed
	$(BIN)/python recipes/train.py --config recipes/configs/demo.yaml
	$(BIN)/python recipes/classify.py runs/demo/model fashion-mnist-mini

test: .venv/installed
	$(BIN)/python -m pytest -n logical --maxprocesses 4 --dist loadfile

goldens: .venv/installed
	$(BIN)/python -m pytest tests/goldens
	$(BIN)/python tests/goldens/same_weights.py HEAD

torture: .venv/installed
	for kind in adamw muon lora fsdp2; do $(BIN)/python tests/torture.py --kind $$kind || exit 1; done

upstream: .venv/installed
	$(BIN)/pip install --quiet --constraint constraints.txt --group upstream
	$(BIN)/python tests/upstream/run.py
	$(BIN)/pip install --quiet --constraint constraints.txt --no-deps --upgrade --target .venv/upstream/packages torchao
	PYTHONPATH=.venv/upstream/packages $(BIN)/python tests/upstream/quantizers.py

.venv/peers/installed: .venv/installed
	$(PYTHON) -m venv .venv/peers
	.venv/peers/bin/pip install --quiet torch torchvision timm open_clip_torch $$(grep '^transformers==' constraints.txt)
	touch $@

peers: .venv/peers/installed
	HF_HUB_OFFLINE=1 .venv/peers/bin/python tests/upstream/peers.py

style: .venv/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/python tests/upstream/mlint.py

clean:
	rm -rf .venv build *.egg-info
