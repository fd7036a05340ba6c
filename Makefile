# Each target sets up what it needs: Python >= 3.11, git and make are enough.
#
#   make train                        grow a network for 8x8 digits, beside the network alone at equal FLOPs (a minute)
#   make train ARGS="--seed 1"        options of `esper grow` follow in ARGS
#   make controller                   train a controller with the preset quickstart, in a new folder under runs/
#   make learn                        train a controller that beats what a search finds, and compare it (18 minutes)
#   make learn SEED=2                 the same with another seed
#   make pretrained                   train the policy that comes with esper anew (five minutes)
#   make test                         the default tests
#   make test-shapes                  a sample of the tests that calls each part once, with the shapes in all signatures checked
#   make check                        format, lint, types, import order and chains
#   make bench                        run the benchmarks and write their tables into docs/benchmarks.md
#   make results                      compare growing with the usual ways on five networks (docs/results.md)
#   make results ARGS=--small         the same with few examples, in half an hour
#   make PYTHON=python3.12 setup      another interpreter

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-stamp
ARGS ?=
# compiled files are kept, whatever the environment says: each process that a test starts would compile esper anew
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q

.PHONY: setup train controller learn pretrained test test-shapes test-slow test-compiled test-gpu check bench results

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@command -v "$(PYTHON)" >/dev/null || { \
		echo "make: there is no $(PYTHON); name a Python of version 3.11 or later with PYTHON=/path/to/python3." >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "make: $(PYTHON) is $$("$(PYTHON)" --version 2>&1), but esper needs Python 3.11 or later;" \
			"name one with PYTHON=/path/to/python3.11." >&2; exit 1; }
	"$(PYTHON)" -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	@touch $@

train: $(STAMP)
	$(BIN)/esper grow digits --flops 5e10 --beside plain --out runs/digits-grown --overwrite $(ARGS)

controller: $(STAMP)
	$(BIN)/esper train --task mixed_digits --num-envs 64 --set ppo.group_size=4 $(ARGS)

SEED ?= 1
FOUND := runs/mixed_digits-learn-s$(SEED)

learn: $(STAMP)  # two cores, 2 GB of memory; the search spends as many env-steps as the controller, at the same time
	@mkdir -p runs
	$(BIN)/esper search mixed_digits --preset learn --seed $(SEED) --num-envs 64 --out $(FOUND)-search \
		> $(FOUND)-search.log 2>&1 & search=$$!; \
	$(BIN)/esper train --preset learn --seed $(SEED) --out $(FOUND) $(ARGS) || { kill $$search; exit 1; }; \
	wait $$search || { cat $(FOUND)-search.log >&2; exit 1; }; \
	cat $(FOUND)-search.log
	$(BIN)/esper evaluate $(FOUND) $(FOUND)-search/best_schedule.json $(FOUND)-search/best_rule.json \
		wait_only heuristic explore_then_commit random untrained static_final static_common big_host \
		--num-envs 128 --out $(FOUND)-evaluation

pretrained: $(STAMP)
	$(BIN)/esper train --preset learn --seed 3 --rounds 60 --set schedule_rounds=60 --out runs/pretrained $(ARGS)
	$(BIN)/python scripts/pretraining.py runs/pretrained src/esper/policies/pretrained.safetensors

test: $(STAMP)
	$(PYTEST) -n 2 --dist loadfile $(ARGS)

SHAPES := tests/runs/test_learner_and_engine.py tests/test_contracts.py tests/kasmina/rules/test_lifecycle.py \
	tests/kasmina/parameters/test_population.py tests/tasks/test_instances.py \
	tests/simic/test_client.py tests/simic/test_ppo.py tests/simic/test_advantages.py \
	tests/simic/test_rollout_buffer.py tests/simic/rewards/test_golden_rewards.py \
	tests/simic/rewards/test_reward_state.py tests/tamiyo/test_network.py tests/tamiyo/test_heads.py \
	tests/tamiyo/test_features.py tests/tamiyo/test_baselines.py tests/tolaria/test_engine.py \
	tests/tolaria/test_coalitions.py tests/tolaria/test_governor.py tests/tolaria/executors/test_every_executor.py

test-shapes: $(STAMP)
	$(PYTEST) -n 2 --dist loadfile --jaxtyping-packages=esper,beartype.beartype $(SHAPES) $(ARGS)

# the tests of a file share one long run
test-slow: $(STAMP)
	$(PYTEST) -m slow -n 2 --dist loadfile $(ARGS)

test-compiled: $(STAMP)
	$(PYTEST) -o addopts="--strict-markers --timeout=600" -m compiled $(ARGS)

test-gpu: $(STAMP)
	$(PYTEST) -o addopts="--strict-markers --timeout=600" -m gpu tests/gpu $(ARGS)  # skipped where there is no GPU

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/house.py

bench: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python scripts/write_benchmarks.py $(ARGS)

results: $(STAMP)  # hours on two cores; what is done is kept, and the same command continues
	OMP_NUM_THREADS=1 $(BIN)/python scripts/practice.py --page docs/results.md --jobs 2 $(ARGS)
