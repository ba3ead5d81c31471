# The commands to remember. PYTHON names another interpreter.
PYTHON ?= python

# What a mistake in the host code breaks first: references and judges, the NumPy kernels against them, plans, masks'
# blocks, what is packed for a kernel or handed to a backend, CUDA texts and their seams, and the refusals of a call.
QUICK = reference compare cases properties numpy_backend patterns planning launch packing indexer_packing handed_down source texts seams api validate
.PHONY: quick check format test-cpu test-gpu pages mutate sanitize bench

check: ## lint, format, types
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

format: ## what the check of formats wants, CUDA included
	$(PYTHON) -m ruff format .
	clang-format -i $$(find cuda_src -name '*.cu*')

quick: check ## before a commit, within a minute on two cores: the above and the fast tests that prove most
	$(PYTHON) -m pytest -q -r fE -m "not gpu and not long" $(QUICK:%=tests/test_%.py)

test-cpu: ## everything a machine without a GPU can prove, compiling included
	$(PYTHON) -m pytest -m "not gpu"

test-gpu: ## the rest, on the GPU at hand
	$(PYTHON) -m pytest -m gpu

pages: ## pictures, what the tour prints, and the site in build/site, with warnings as errors
	$(PYTHON) docs/_tools/pictures.py
	$(PYTHON) docs/_tools/notebook.py docs/tour.ipynb
	$(PYTHON) -m sphinx -q -W --keep-going docs build/site

mutate: ## small faults planted in the host code, one at a time, and what the tests say; about an hour
	$(PYTHON) tests/mutate.py --count 100 --jobs 2

sanitize: ## a matrix of calls under compute-sanitizer, of the CUDA toolkit; a planted fault must be noticed
	$(PYTHON) tests/sanitize.py

bench: ## time this package on the GPU at hand
	$(PYTHON) -m streamkl_cupy bench
