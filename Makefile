# The front door. Every target does its own set-up on Debian 12 and Ubuntu 24.04, and does nothing
# twice. The work is done by scripts/ and CMake; this file only says in which order.
#
#   JOBS=n             compile jobs (otherwise from cores and memory, scripts/jobs)
#   TORCH_DIR=folder   use this LibTorch or Python package torch
#   CXX=compiler       another compiler than g++
#   FUZZ_RUNS=n        make fuzz: inputs for each parser; FUZZ_SECONDS=n: as many as fit in that time
#   SEEDS=first:last   make fuzz: the models that are drawn, 1:10000 unless given
#   PEERS=1            make bench: installs FSDP2's and DeepSpeed's Python into build/peers-venv first
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS += --no-print-directory --no-builtin-rules
.DEFAULT_GOAL := help
# Targets share the build folders; ninja and ctest use the cores.
.NOTPARALLEL:

FUZZ_RUNS ?= 1000000
FUZZ_SECONDS ?= 0
FUZZ_SEED ?= 1
SEEDS ?= 1:10000
export JOBS TORCH_DIR CXX
# Make's own default is the name of some compiler, not a wish of the user's.
ifeq ($(origin CXX),default)
unexport CXX
endif

.PHONY: help setup build demo test bench bench-gpu format fuzz tidy clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*  ## /  make \1\t/p' Makefile | expand -t 18
	@sed -n 's/^#   /  /p' Makefile

setup:  ## what the others do first: packages by apt, torch into .venv unless one is found
	@scripts/setup

build: setup  ## the program, at build/tessera
	@scripts/build dev tessera
	@ln -sfn dev/bin/tessera build/tessera
	@test -f build/tessera -a -x build/tessera || { echo "build/tessera leads to no program: build/dev/bin has none" >&2; exit 1; }
	@echo "built build/tessera"

demo: build  ## checks that sharded training matches unsharded; trains a GPT with its states on disk
	build/tessera train --ranks 2 --verify 3
	@mkdir -p build/demo
	build/tessera train --ranks 2 --steps 60 --host-budget 4MiB --nvme build/demo

test:  ## all tests, those of torch-free modules under the sanitizers; layers, format, tidy of what changed
	@scripts/setup --tools
	@scripts/test

bench: build  ## the benchmarks, against what they are measured by
	@scripts/build dev benchmarks
	@scripts/bench $(if $(PEERS),--peers)

bench-gpu: build  ## Tessera beside its peers on one GPU (ARGS="--help" lists what it can be told)
	@scripts/bench-gpu $(ARGS)

format:  ## formats the sources; CHECK=1 only says what it would change
	@scripts/setup --tools
	@scripts/format $(if $(CHECK),--check)

fuzz: setup  ## random input: FUZZ_RUNS=1000000 for each parser, then 10,000 models for the engine
	@scripts/fuzz $(FUZZ_RUNS) $(FUZZ_SECONDS) $(FUZZ_SEED)
	@scripts/fuzz_engine $(SEEDS)

tidy:  ## clang-tidy over all units: a quarter of an hour on two cores
	@scripts/setup --tools
	@scripts/tidy

clean:  ## removes the build folders; keeps .venv and what setup found
	@find build -mindepth 1 -maxdepth 1 ! -name setup -exec rm -rf {} + 2>/dev/null || true
