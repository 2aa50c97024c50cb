PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# On Linux the default index has torch with gigabytes of CUDA; the CPU build is enough for everything here.
TORCH := torch==2.13.0$(if $(filter Linux,$(shell uname -s)),+cpu)
TORCH_INDEX := https://download.pytorch.org/whl/cpu

.PHONY: help demo test lint bench-accuracy bench-allocator bench-frontier bench-planning bench-simulation workspaces recipes clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

$(VENV)/torch: constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -q -c constraints.txt "$(TORCH)" 2>/dev/null || $(PIP) install -q -c constraints.txt "$(TORCH)" --extra-index-url $(TORCH_INDEX)
	@touch $@

$(VENV)/memfit: $(VENV)/torch pyproject.toml
	$(PIP) install -q -c constraints.txt -e .
	@touch $@

$(VENV)/everything: $(VENV)/memfit
	$(PIP) install -q -c constraints.txt -e ".[test,models,recipes]"
	@touch $@

demo: $(VENV)/memfit  ## set up, then fit a 3D autoencoder that needs several GiB into a fraction, prove it and run it
	@$(BIN)/memfit demo

lint: $(VENV)/everything  ## style and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check src tests benchmarks recipes
	$(BIN)/mypy

test: lint  ## set up, then run the whole test suite
	OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n 2

bench-accuracy: $(VENV)/everything  ## predicted against measured memory, for 17 public models (about an hour)
	$(BIN)/python benchmarks/accuracy.py

bench-frontier: $(VENV)/everything  ## peak against time: memfit beside checkpointing, compiling and offloading (an hour)
	$(PIP) install -q -c constraints.txt -e ".[bench]"
	$(BIN)/python benchmarks/frontier.py

bench-allocator: $(VENV)/everything  ## what the process holds beside its tensors, and what giving it back costs (half an hour)
	$(BIN)/python benchmarks/allocator.py

bench-simulation: $(VENV)/everything  ## the time a simulation takes, against torch's own memory tracker
	$(BIN)/python benchmarks/simulation_speed.py

bench-planning: $(VENV)/everything  ## the time a plan takes, for 17 public models and a transformer of 48 layers (half an hour)
	$(BIN)/python benchmarks/planning_speed.py

workspaces: $(VENV)/everything  ## measure again what operators take inside, over the benchmark's models
	$(BIN)/python benchmarks/workspaces.py

recipes: $(VENV)/everything  ## measure the five recipes and write their tables (several hours); real data: CIFAR10=… RADAR=…npz VOLUMES=…
	$(BIN)/python recipes/conditional_unet/table.py $(if $(CIFAR10),--data-dir $(CIFAR10))
	$(BIN)/python recipes/radar_vae/table.py $(if $(RADAR),--data-dir $(RADAR))
	$(BIN)/python recipes/radar_vae/full_size.py --samples 2
	$(BIN)/python recipes/pixel_loss/table.py
	$(BIN)/python recipes/volume_autoencoder/table.py $(if $(VOLUMES),--data-dir $(VOLUMES))
	$(if $(VOLUMES),$(BIN)/python recipes/volume_autoencoder/high_resolution.py --data-dir $(VOLUMES))
	$(BIN)/python recipes/cifar10/table.py $(if $(CIFAR10),--data-dir $(CIFAR10))

clean:  ## remove the environment
	rm -rf $(VENV)
