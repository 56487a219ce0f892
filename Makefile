# make demo, make test, make expr1, make expr2, make expr3: set everything up on a fresh Debian or Ubuntu machine (Python 3.10 or newer), then run.
PYTHON ?= python3
VENV ?= .venv
# PyPI's torch may depend on CUDA packages; to install a CPU-only build, set this to a package index that has one.
TORCH_INDEX ?=

bin := $(VENV)/bin
stamp := $(VENV)/.installed
# Sources of the compiled modules and of the dependency list; Python files are used in place (editable install).
sources := setup.cfg pyproject.toml constraints.txt $(wildcard pyx/*.pyx pyx/*.pxd pyx/*.pxi pyx/*.h bench/paper/ladder/*.pyx bench/paper/ladder/*.h)
torch := $(shell sed -n 's/^torch==//p' constraints.txt)

.PHONY: demo test test-thorough test-guest test-gpu gpu test-ecosystem test-frameworks test-mxnet test-torch-versions races fuzz fuzzers strangers docs bench expr1 expr2 expr3 breakdown results chaos soak lint coverage wheels setup system sshd \
	mpi guest clean
.DELETE_ON_ERROR:

demo: $(stamp)
	$(bin)/python examples/digits/demo.py --out out/demo

# All tests except those that need RDMA devices, two files at a time. Of large matrices and of slow tests a twelfth is run,
# chosen by the commit hash. PYTEST adds arguments.
PYTEST ?=
test: $(stamp) sshd mpi
	$(bin)/pytest -q --durations=10 --ignore=tests/guest --ignore=tests/gpu --numprocesses=2 --dist=loadfile $(THOROUGH) $(PYTEST)
	@echo "not run here: what pytest's line \"left out\" counts (make test-thorough)"
	@echo "not run here: tests/guest, which need RDMA devices (make test-guest: in an emulated machine that has two)"
	@echo "not run here: tests/gpu, which need a GPU (make test-gpu: skipped where there is none)"
	@echo "skipped without their frameworks: tests/jax, tests/tensorflow, tests/keras (make test-frameworks), tests/mxnet (make test-mxnet), tests/ecosystem (make test-ecosystem)"

# The same with the whole matrices and the tests that take minutes: some hours on two cores.
test-thorough: THOROUGH := --thorough
test-thorough: test test-guest

# Tests that need RDMA devices, in an emulated machine that has two: a sixth of them, chosen by the commit hash.
test-guest: $(stamp) guest
	$(bin)/pytest -q --durations=10 tests/guest $(THOROUGH) $(PYTEST)

# Tests that need a GPU; `make gpu` then runs the bench, whose samples go into RESULTS: eight minutes. SITE=python3 uses
# that Python's PyTorch and CuPy and downloads nothing; WHEELS=DIR has wheels of what it lacks. DEVICE=host tries all this
# without a GPU.
SITE ?=
WHEELS ?=
DEVICE ?= cuda
RESULTS ?= $(if $(filter host,$(DEVICE)),out/gpu,bench/results)
gpu := $(VENV)$(if $(SITE),-site)
test-gpu: $(gpu)/.gpu
	BPSTEST_DEVICE=$(DEVICE) $(gpu)/bin/python -m pytest -q --durations=10 tests/gpu

gpu: $(gpu)/.gpu
	$(gpu)/bin/python -m tests.gpu --device $(DEVICE) --out $(RESULTS)

# CuPy for the CUDA that torch is built for.
$(VENV)/.gpu: $(stamp)
	@cuda=$$($(bin)/python -c 'import torch; print((torch.version.cuda or "no CUDA").partition(".")[0])'); \
	case "$$cuda" in \
	  12) $(bin)/pip install --quiet --constraint constraints.txt --editable .[cuda] && touch $@ ;; \
	  13) $(bin)/pip install --quiet --constraint constraints.txt --editable .[cuda13] && touch $@ ;; \
	  *) echo "no CuPy is installed: torch is built for $$cuda" ;; \
	esac

$(VENV)-site/.gpu: $(sources)
	$(SITE) -m venv --without-pip $(VENV)-site
	$(SITE) -c 'import site; print(*site.getsitepackages(), sep="\n")' \
	  >$$($(VENV)-site/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/of_site.pth
	$(VENV)-site/bin/python -m pip install --quiet --no-index $(if $(WHEELS),--find-links $(WHEELS)) --no-build-isolation \
	  --editable .
	touch $@

# Tests of the examples for Lightning, Accelerate, Transformers, Ray and torchft: 700 MB and some minutes to install.
test-ecosystem: $(stamp)
	$(bin)/pip install --quiet --constraint constraints.txt --editable .[ecosystem,test]
	$(bin)/pytest -q --durations=10 tests/ecosystem/test_ecosystem.py

# Tests of what uses torch, with other versions of torch: 5 GB each from PyPI, one at a time (CPU builds from TORCH_INDEX:
# 1 GB).
test-torch-versions: $(stamp)
	$(bin)/python -m tests.support.torch_versions $(if $(TORCH_INDEX),--index $(TORCH_INDEX)) $(TORCH_VERSIONS)

# Tests with other frameworks than torch, which take some hundred MB to install.
framework_tests := tests/jax tests/tensorflow tests/hvd/test_hvd_tensorflow.py tests/keras \
  tests/bench/test_bench_frameworks.py tests/project/test_api.py
test-frameworks: $(stamp)
	$(bin)/pip install --quiet --constraint constraints.txt --editable .[jax,keras,tensorflow,test]
	$(bin)/pytest -q --durations=10 --numprocesses=2 --dist=loadfile $(framework_tests) $(PYTEST)

# MXNet 1.9.1 is retired and needs NumPy below 1.24, so it gets a virtual environment of its own.
mxnet := $(VENV)/mxnet
test-mxnet: $(stamp)
	test -x $(mxnet)/bin/pip || $(PYTHON) -m venv $(mxnet)
	$(mxnet)/bin/pip install --quiet --editable . "mxnet==1.9.1" "numpy<1.24" "scikit-learn<1.6" pytest pytest-timeout hypothesis
	$(mxnet)/bin/pytest -q --durations=10 tests/mxnet/test_mxnet.py tests/mxnet/test_mxnet_digits.py

# Style and types. mypy sees the package as it is imported, with bpsfast.orchestration and bpsfast.pyx inside.
view := $(VENV)/view
lint: $(stamp)
	$(bin)/pip install --quiet --constraint constraints.txt --editable .[lint,test]
	$(bin)/ruff check bpsfast orchestration tests bench examples pyx
	PATH=$(CURDIR)/$(bin):$$PATH cython-lint --max-line-length 120 pyx bench/paper/ladder
	rm -rf $(view) && mkdir -p $(view)/bpsfast
	ln -s $(CURDIR)/bpsfast/* $(CURDIR)/orchestration $(CURDIR)/pyx $(view)/bpsfast/
	MYPYPATH=$(view) $(bin)/mypy --no-incremental --config-file pyproject.toml -p bpsfast
	$(bin)/mypy bench

# Coverage of Python, C and Cython by the tests on this machine and in the emulated one: reports below out/coverage. It
# builds the compiled modules twice.
coverage: $(stamp) sshd mpi guest
	$(bin)/pip install --quiet --constraint constraints.txt --editable .[coverage,test]
	$(bin)/python -m tests.support.covered --pytest="$(THOROUGH) $(PYTEST)"

# An sdist and wheels for these interpreters, into dist/, each tried without a compiler: two minutes for each.
PYTHONS ?= $(PYTHON)
wheels: $(stamp)
	$(bin)/pip install --quiet --constraint constraints.txt --editable .[release,test]
	$(bin)/python -m tests.support.wheels $(PYTHONS)

# Pages and API reference, below out/docs. Any warning is an error. Modules for frameworks that are not installed are
# documented, too.
docs: $(stamp)
	$(bin)/pip install --quiet --constraint constraints.txt --editable .[docs]
	$(bin)/python -m bpsfast.docs.settings_page
	$(bin)/sphinx-build --quiet --fail-on-warning --keep-going -c bpsfast/docs -b html . out/docs
	@echo "written: out/docs/bpsfast/docs/index.html"

# ThreadSanitizer on C programs of tests/native, then on our compiled modules, SECONDS for each program.
races: $(stamp)
	$(bin)/python -m tests.support.races $(SECONDS)

# Fuzz all parsers of a peer's bytes for SECONDS in all (600). Inputs that crash one are saved in out/fuzz.
fuzz: $(stamp) fuzzers
	$(bin)/python -m tests.support.fuzzing $(SECONDS)

# Send this many random messages to each kind of socket that a training job listens on: a million take ten minutes.
MESSAGES ?= 1000000
strangers: $(stamp)
	$(bin)/pytest -q tests/end_to_end/test_strangers.py -o faulthandler_timeout=0 --strangers-messages=$(MESSAGES)

bench: $(stamp)
	$(bin)/bpsfast bench kernels --quick
	$(bin)/bpsfast bench push_pull --quick

# Step times on real packets, compared with the formulas: an hour and a half, as root. Writes bench/results/optimum_*.jsonl and expr1.*.
expr1: $(stamp)
	$(bin)/python -m bpsfast.bench.paper.expr1

# The ways to sum inside a machine, compared with the paper's twelve bars: some seconds. Writes bench/results/expr2.*.
expr2: $(stamp)
	$(bin)/python -m bpsfast.bench.paper.expr2

# The simulator, compared with the paper's figures: some minutes on one core. Writes bench/results/expr3.*.
expr3: $(stamp)
	$(bin)/python -m bpsfast.bench.paper.expr3

# What each part of the design adds, real packets and 256 simulated GPUs: a quarter of an hour, as root. Writes
# bench/results/breakdown.*.
breakdown: $(stamp)
	$(bin)/python -m bpsfast.bench.paper.breakdown

# Measure every number and plot of the README again, by the targets above and by benches: some hours, as root. ARGS=--list
# shows what each piece writes, how long it takes and what it lacks here; ARGS="--only expr3" runs one.
ARGS ?=
results: $(stamp)
	$(bin)/python -m bpsfast.bench.regeneration $(ARGS)

# chaos and soak run this many busy processes for each core beside the job.
LOAD ?= 0

# Jobs whose processes are killed and stopped: about ten seconds each. Ends with 0 if none hangs or has a wrong sum.
SEEDS ?= 20
chaos: $(stamp)
	$(bin)/bpsfast bench chaos --seeds $(SEEDS) --load $(LOAD)

# One job that trains for MINUTES: memory, descriptors and threads of its processes must not grow. LOSSES: so many of its
# workers are killed and replaced.
MINUTES ?= 5
LOSSES ?= 0
soak: $(stamp)
	$(bin)/bpsfast bench soak --minutes $(MINUTES) --load $(LOAD) --losses $(LOSSES)

setup: $(stamp)

$(stamp): $(sources)
	@$(MAKE) --no-print-directory system
	test -x $(bin)/pip || $(PYTHON) -m venv $(VENV)
	$(if $(TORCH_INDEX),$(bin)/pip install --quiet --no-deps --extra-index-url $(TORCH_INDEX) torch==$(torch)+cpu)
	$(bin)/pip install --quiet --constraint constraints.txt --editable .[demo,test]
	touch $@

# Installs missing system packages if run by root on Debian or Ubuntu; else prints in one line what is missing.
system:
	@needed=""; wished=""; \
	$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || needed="$$needed python3-venv"; \
	$(PYTHON) -c 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null \
	  || needed="$$needed python3-dev"; \
	command -v cc >/dev/null || needed="$$needed gcc libc6-dev"; \
	command -v ip >/dev/null || wished=" iproute2"; \
	if [ -z "$$needed$$wished" ]; then exit 0; fi; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  apt-get update -qq && \
	  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$needed $$wished && exit 0; \
	fi; \
	if [ -n "$$needed" ]; then echo "missing system packages; as root: apt-get install$$needed$$wished" >&2; exit 1; fi; \
	echo "no ip command (package iproute2): the demo uses loopback, tests of network namespaces are skipped"

# The program sshd, for tests of jobs over ssh. The service is neither started nor left enabled.
sshd:
	@if test -x /usr/sbin/sshd && command -v ssh >/dev/null; then exit 0; fi; \
	ours=""; installed=""; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  policy=/usr/sbin/policy-rc.d; \
	  if [ ! -e $$policy ]; then printf '#!/bin/sh\nexit 101\n' >$$policy; chmod +x $$policy; ours=$$policy; fi; \
	  apt-get update -qq && \
	  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends openssh-server openssh-client \
	  && { systemctl disable --quiet ssh.service ssh.socket 2>/dev/null; installed=yes; }; \
	  test -z "$$ours" || rm -f "$$ours"; \
	  test -z "$$installed" || exit 0; \
	fi; \
	echo "no sshd (package openssh-server): tests of jobs over ssh are skipped"

# The fuzzing engines: clang with its libFuzzer, and atheris for Python.
fuzzers: $(stamp)
	@if ! command -v clang >/dev/null || ! test -e "$$(clang -print-file-name=libclang_rt.fuzzer-$$(uname -m).a)" \
	    && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  apt-get update -qq && \
	  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends clang && \
	  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
	    "libclang-rt-$$(clang -dumpversion | cut -d. -f1)-dev" || true; \
	fi
	@$(bin)/python -c 'import atheris' 2>/dev/null || $(bin)/pip install --quiet atheris

# Packages for the emulated machine with RDMA devices. Where they cannot be installed, the skipped tests say so.
guest:
	@packages=""; \
	command -v qemu-system-x86_64 >/dev/null || packages="$$packages qemu-system-x86"; \
	test -e /etc/libibverbs.d/rxe.driver || packages="$$packages libibverbs1 ibverbs-providers"; \
	command -v ib_write_bw >/dev/null || packages="$$packages perftest"; \
	/usr/bin/python3 -c 'import pyverbs' 2>/dev/null || packages="$$packages python3-pyverbs"; \
	if [ -n "$$packages" ] && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  apt-get update -qq && \
	  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$packages \
	  || echo "not installed:$$packages"; fi

# Open MPI's mpirun, for one test. Where it cannot be installed, that test is skipped and says so.
mpi:
	@command -v mpirun >/dev/null || if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends openmpi-bin \
	  || echo "not installed: openmpi-bin"; fi

clean:
	rm -rf build dist out *.egg-info pyx/*.c pyx/*.so bench/paper/ladder/*.c bench/paper/ladder/*.so $(VENV) $(VENV)-site
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
