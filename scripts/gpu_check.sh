#!/usr/bin/env bash
# specax-gpu-check with the CUDA compilers beside .venv, in .gpu-compilers (0.6 GB): inside it, JAX would look for a
# GPU at every start. Arguments go to specax-gpu-check. Returns at once from installing where that is done already.
set -euo pipefail
cd "$(dirname "$0")/.."

folder=.gpu-compilers
python=.venv/bin/python
# The plugin has to be of JAX's own version. ptxas: 12.8.0 up to 12.9.1 miscompiles causal masks.
wanted=("jax-cuda12-plugin==$("$python" -c 'import importlib.metadata as m; print(m.version("jax"))')"
  "nvidia-cuda-nvcc-cu12>=12.9.86")

if [ "$(cat "$folder/.installed" 2>/dev/null)" != "${wanted[*]}" ]; then
  printf '[gpu-check] installing %s into %s\n' "${wanted[*]}" "$folder" >&2
  rm -rf "$folder"
  "$python" -m pip install --quiet --disable-pip-version-check --target "$folder" "${wanted[@]}" >&2
  printf '%s\n' "${wanted[*]}" >"$folder/.installed"
fi
PYTHONPATH="$folder${PYTHONPATH:+:$PYTHONPATH}" exec "$python" -m specax.decoding.gpu.check "$@"
