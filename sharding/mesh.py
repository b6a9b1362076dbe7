"""Device meshes with specax's axis names."""

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

AXES = ("data", "tensor")


def make_mesh(tensor: int = 1, data: int = 1, devices: list[jax.Device] | None = None) -> Mesh:
    """A `(data, tensor)` mesh over the first `data · tensor` devices.

    Raises:
      ValueError: a size below 1, or fewer devices than asked for.
    """
    devices = jax.devices() if devices is None else devices
    need = data * tensor
    if min(data, tensor) < 1 or len(devices) < need:
        raise ValueError(
            f"mesh data={data} x tensor={tensor} needs {need} devices, {len(devices)} are here "
            "(on a CPU, XLA_FLAGS=--xla_force_host_platform_device_count=N makes N virtual ones)"
        )
    grid = np.asarray(devices[:need], dtype=object).reshape(data, tensor)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))
