"""What the programs share: grouped --help, the --config flag, loading with a progress bar."""

import dataclasses
import logging
import os
import pathlib
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import rich.console
import rich.progress
from absl import app, flags

import specax.configs
from specax.decoding.compile_cache import enable_compile_cache
from specax.decoding.errors import InvalidRequestError
from specax.model.errors import SpecaxError

if TYPE_CHECKING:
    from specax.decoding.llm import LLM

ENGINE_CONFIG = str(pathlib.Path(specax.configs.__path__[0]) / "engine.py")

# Results go to stdout; everything that only informs goes here.
stderr = rich.console.Console(stderr=True)


def define_model_flags() -> list[flags.FlagHolder]:
    """--model, --dtype, --tensor_parallel."""
    model = flags.DEFINE_string(
        "model", "smollm2", "Demo model (smollm2), Hugging Face style directory, or .gguf file."
    )
    dtype = flags.DEFINE_enum(
        "dtype", None, ["float32", "bfloat16", "float16"], "Default: bfloat16 on a GPU, float32 on a CPU."
    )
    tensor = flags.DEFINE_integer("tensor_parallel", 1, "Devices to split the model over.", lower_bound=1)
    return [model, dtype, tensor]


def define_config_flag() -> Any:
    """--config, with the engine's sizes; an unknown key is an error."""
    from ml_collections import config_flags  # (not every program has an engine)

    text = "Engine sizes; change one with --config.KEY=VALUE (see configs/engine.py)."
    try:
        return config_flags.DEFINE_config_file("config", ENGINE_CONFIG, text)
    except (AttributeError, KeyError) as error:  # ml_collections looks at the command line right here
        from specax.decoding.config import EngineConfig

        keys = ", ".join(field.name for field in dataclasses.fields(EngineConfig))
        sys.exit(f"--config has no such key: {' '.join(str(error.args[0]).split())}\nThe keys: {keys}")


def load_llm(model_flags: Sequence[flags.FlagHolder], config: Any) -> "LLM":
    """Loads the model that the flags name, showing progress on stderr."""
    from specax.decoding.config import EngineConfig
    from specax.decoding.llm import LLM
    from specax.sharding import make_mesh

    model, dtype, tensor = (flag.value for flag in model_flags)
    mesh = make_mesh(tensor=tensor) if tensor > 1 else None
    with progress_bar(f"loading {pathlib.Path(model).name}") as report:
        engine = EngineConfig(**config.to_dict())
        return LLM.from_pretrained(model, dtype=dtype, mesh=mesh, engine=engine, progress=report)


def log_console() -> rich.console.Console:
    """`stderr` for tables: a log has no width, and gets 140 columns."""
    return stderr if stderr.is_terminal else rich.console.Console(stderr=True, width=140)


def output_path(name: str, value: str | None) -> pathlib.Path | None:
    """The file that flag `name` says to write, probed before the work; None without a value.

    Raises:
      InvalidRequestError: it can't be written.
    """
    if not value:
        return None
    path = pathlib.Path(value)
    why = ""
    if path.is_dir():
        why = "it is a directory"
    elif not path.parent.is_dir():
        why = f"there is no directory {path.parent}"
    elif not os.access(path.parent, os.W_OK) or (path.exists() and not os.access(path, os.W_OK)):
        why = "no permission"
    if why:
        raise InvalidRequestError(f"--{name}: can't write {path}: {why}; name a file in a directory to write to")
    return path


class progress_bar:
    """A progress bar on stderr (or another console); entering it gives a `report(done, total)`."""

    def __init__(self, label: str, console: rich.console.Console = stderr):
        self._bar = rich.progress.Progress(
            *rich.progress.Progress.get_default_columns(),
            rich.progress.TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._label = label

    def __enter__(self) -> Callable[[int, int], None]:
        task = self._bar.add_task(self._label, total=None)
        self._bar.start()
        return lambda done, total: self._bar.update(task, completed=done, total=total)

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def run_program(main: Callable[[], None], about: str, groups: Mapping[str, Sequence[Any]]) -> None:
    """Runs an absl program: grouped --help, the compilation cache on, our errors in one line."""
    if any(arg in ("--help", "-h", "-help") for arg in sys.argv[1:]):
        print(_help(about, groups))
        return

    def guarded(argv: list[str]) -> None:
        if len(argv) > 1:
            raise app.UsageError(f"unexpected argument {argv[1]!r}; settings are flags, see --help")
        enable_compile_cache()
        logging.getLogger("jax").setLevel(logging.WARNING)  # absl shows its INFO lines else
        try:
            main()
        except (SpecaxError, ValueError) as error:
            stderr.print(f"[bold red]{type(error).__name__}[/]: ", end="")
            stderr.print(str(error), markup=False, highlight=False, soft_wrap=True)
            sys.exit(2)
        except KeyboardInterrupt:
            stderr.print("interrupted")
            sys.exit(130)

    app.run(guarded)


def _help(about: str, groups: Mapping[str, Sequence[Any]]) -> str:
    lines = [about.strip(), ""]
    for title, holders in groups.items():
        lines.append(f"{title}:")
        for holder in holders:
            flag = flags.FLAGS[holder.name]
            default = "" if flag.default in (None, [], "") or holder.name == "config" else f" [{flag.default}]"
            text = textwrap.wrap(flag.help.split(";\n")[0] + default, 78)
            lines.append(f"  --{holder.name}")
            lines.extend(f"      {line}" for line in text)
        lines.append("")
    return "\n".join([*lines, "Every flag of absl and JAX: --helpfull"])
