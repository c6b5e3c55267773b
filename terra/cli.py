"""The command line: one table of commands, and the code that runs a command's function with checked settings.

A user's error ends as one line on stderr and exit code 2.
"""

import difflib
import functools
import gc
import importlib
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from terra import __version__, without_garbage_collection
from terra.errors import ConfigError, TerraError
from terra.extras import extras_named

if TYPE_CHECKING:
    from omegaconf import DictConfig


@dataclass(frozen=True)
class Command:
    """A command of `terra`. Its settings are those of conf/NAME.yaml, its help page is conf/hydra/help/NAME.yaml.

    Attributes:
        name: the command's name as typed.
        function: "module:name" of the function that runs, of checked settings. A whole number that the function returns
            is the exit code.
        settings: "module:name" of the pydantic model that checks the settings. Its module does without torch, whose
            import takes seconds, so that a wrong value is refused at once.
        job: one line of help.
        inputs: names of settings that are input paths, which must exist.
        models: names of settings that are a model: a name such as demo, a folder, or a Hub id.
        check_inputs: "module:name" of a function of the checked settings that refuses bad inputs without torch, before
            `function` is imported; empty for none.
        bare: name of the setting that takes the arguments without a "=", as a list; empty: there are none.
    """

    name: str
    function: str
    settings: str
    job: str
    inputs: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    check_inputs: str = ""
    bare: str = ""

    @property
    def config_name(self) -> str:
        """The command's configuration, conf/CONFIG_NAME.yaml."""
        return self.name.replace("-", "_")

    def load(self) -> Callable[..., Any]:
        """Import the function."""
        return _imported(self.function)

    def check(self, config: "DictConfig") -> Any:
        """Check settings with the pydantic model. Raises ConfigError."""
        from terra.config.files import plain
        from tokenizer.settings import checked

        return checked(_imported(self.settings), plain(config))

    def run(self, config: "DictConfig") -> None:
        """Unpack worlds at hand, check paths and settings, import the function, and call it.

        Raises TerraError, and SystemExit with its exit code.
        """
        from terra.config.files import check_paths, worlds_to_unpack

        if to_unpack := worlds_to_unpack(config):
            self.check(config)  # unpacking takes seconds: a wrong value is said before
            for folder, archive in to_unpack.items():
                _imported("terra.worlds.archive:unpack_once")(archive, folder)
        check_paths(config, self.inputs, self.models)
        # A function imports some packages only when it needs them, so its own work is looked at, too.
        with extras_named(f"terra {self.name}"):
            settings = self.check(config)
            if self.check_inputs:
                _imported(self.check_inputs)(settings)
            code = self.load()(settings)
        if isinstance(code, int) and code:
            sys.exit(code)


def _imported(path: str) -> Any:
    """What "module:name" names."""
    module, _, name = path.partition(":")
    if module not in sys.modules:
        with without_garbage_collection():
            importlib.import_module(module)
        gc.freeze()  # a command's imports stay to its end
    return getattr(sys.modules[module], name)


GROUPS: dict[str, tuple[Command, ...]] = {
    "Generate": (
        Command(
            "generate",
            "terra.generate:run",
            "terra.generate_settings:GenerateSettings",
            "one video of context frames and actions",
            ("context", "trajectory", "actions", "adapter"),
            check_inputs="terra.generate_settings:check_inputs",
        ),
        Command(
            "rollout",
            "terra.rollouts.batch:run",
            "terra.rollouts.settings:BatchSettings",
            "many videos of a manifest",
            ("manifest", "context_root", "adapter"),
            check_inputs="terra.rollouts.manifest:check_manifest",
        ),
        Command(
            "serve",
            "terra.serving.run:run",
            "terra.serving.settings:ServeSettings",
            "drive in the browser; videos and live sessions by HTTP",
            ("scenes", "adapter"),
        ),
        Command(
            "replay",
            "terra.replay:run",
            "terra.replay.settings:ReplaySettings",
            "make a rollout again from its rollout.json, and compare",
            ("folder", "context", "trajectory", "actions", "map", "adapter"),
        ),
    ),
    "Data": (
        Command(
            "record",
            "terra.recording.run:run",
            "terra.recording.run:RecordCommand",
            "driving in the procedural town, or a Gymnasium environment",
        ),
        Command(
            "import",
            "terra.dataset.importing.command:run",
            "terra.dataset.importing.command:ImportCommand",
            "recordings from elsewhere",
            ("input",),
        ),
        Command(
            "inspect",
            "terra.dataset.inspect:run",
            "terra.dataset.inspect:InspectSettings",
            "numbers, doubts and pictures of recordings",
            ("data",),
        ),
        Command(
            "tokenize",
            "terra.training.tokenize:run",
            "terra.training.settings:TokenizeSettings",
            "recordings to tokens",
            ("data",),
            ("checkpoint",),
        ),
    ),
    "Train": (
        Command(
            "train-tokenizer",
            "terra.training.tokenizer:run",
            "terra.training.tokenizer_settings:TrainTokenizerSettings",
            "a tokenizer on frames",
            ("data", "old_data"),
            ("decoder_of", "init_from"),
        ),
        Command(
            "train",
            "terra.training.world_model:run",
            "terra.training.world_model_settings:TrainWorldModelSettings",
            "a world model on tokens",
            ("data", "preview_tokenizer", "old_data"),
            ("init_from",),
        ),
        Command(
            "train-estimator",
            "terra.evaluation.estimator_training:run",
            "terra.evaluation.training_settings:TrainEstimatorSettings",
            "an estimator of motion, or of actions, for terra evaluate",
            ("data", "checkpoint"),
        ),
        Command(
            "train-refiner",
            "terra.evaluation.refiner_training:run",
            "terra.evaluation.training_settings:TrainRefinerSettings",
            "a video refiner, and its flicker",
            ("data",),
        ),
    ),
    "Measure": (
        Command(
            "evaluate",
            "terra.evaluation.evaluate:run",
            "terra.evaluation.settings:EvaluationSettings",
            "a tokenizer and a world model on held-out recordings",
            ("data", "old_data", "adapter", "estimator", "network_path", "video_network_path"),
        ),
        Command(
            "act-bench",
            "terra.act_bench.run:run",
            "terra.act_bench.settings:ActBenchSettings",
            "does a video do what its trajectory says?",
            ("manifest", "context_root", "videos"),
        ),
        Command(
            "benchmark",
            "terra.benchmark.run:run",
            "terra.benchmark.settings:BenchmarkSettings",
            "the speed of the engines, side by side",
            ("drive",),
        ),
    ),
    "Checkpoints": (
        Command(
            "check",
            "terra.check.run:check",
            "terra.check.settings:CheckSettings",
            "are checkpoints whole, as published, a pair?",
            ("context", "trajectory", "actions"),
        ),
        Command(
            "convert",
            "terra.check.convert:run",
            "terra.check.settings:ConvertSettings",
            "others' tokenizers, and the published refiner",
            ("input",),
        ),
        Command(
            "pack", "terra.worlds.archive:pack", "terra.worlds.settings:PackSettings", "a world as one file", ("world",)
        ),
        Command(
            "unpack",
            "terra.worlds.archive:unpack",
            "terra.worlds.settings:UnpackSettings",
            "the folder of a packed world",
            check_inputs="terra.worlds.settings:find_archives",
            bare="archive",
        ),
    ),
    "Installation": (
        Command(
            "info",
            "terra.info.command:run",
            "terra.info.settings:InfoSettings",
            "versions, machine, engines and worlds, for a bug report",
        ),
    ),
}
COMMANDS = {command.name: command for group in GROUPS.values() for command in group}

# Settings of Hydra's that all commands share: results have folders of their own, and nothing else is written.
_HYDRA = ("hydra.run.dir=.", "hydra.output_subdir=null")
_FIXED = ("hydra.run", "hydra.output_subdir", "hydra.job_logging", "hydra.hydra_logging")
_LOGGING, _WITHOUT_FILE = ("hydra/job_logging", "hydra/hydra_logging"), ("none", "stdout", "disabled")
_VALUED = {"-c", "--cfg", "-p", "--package", "-cp", "--config-path", "-cn", "--config-name", "-cd", "--config-dir"}
_VALUED |= {"-i", "--info"}
_FLAGS = _VALUED | {"-h", "--help", "--hydra-help", "--version", "--resolve", "-r", "--run", "-m", "--multirun"}
_COMPLETION = {"-sc", "--shell-completion"}
_LONGEST_LINE = 1000  # characters of an error


def main() -> None:
    """Run `terra COMMAND ...`, `terra-COMMAND ...` or `python -m terra COMMAND ...`."""
    program, arguments = Path(sys.argv[0]).name, sys.argv[1:]
    name = program.removesuffix(".exe").removeprefix("terra-")
    if name not in COMMANDS or not program.startswith("terra-"):
        if not arguments or arguments[0] in ("-h", "--help", "help"):
            print(_overview())
            return
        if arguments[0] == "--version":
            print(f"terra {__version__}")
            return
        name, *arguments = arguments
        if name not in COMMANDS:
            close = difflib.get_close_matches(name, COMMANDS, n=1)
            hint = f"did you mean {close[0]}?" if close else "terra --help lists them"
            _exit(f"{name}: no such command; {hint}")
    sys.argv = [f"terra-{name}", *arguments]
    command(COMMANDS[name].config_name, COMMANDS[name].run, COMMANDS[name].bare)


def command(config_name: str, job: Callable[["DictConfig"], None], bare: str = "") -> None:
    """Run `job` as a Hydra application over conf/CONFIG_NAME.yaml: composed settings in, one-line errors out.

    `bare` is as in `Command`.
    """
    arguments, help_lists_settings = _without_all(sys.argv[1:])
    if "--version" in arguments:
        print(f"terra {__version__}")
        return
    import hydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from terra.config.files import check_keys, config_dir, register_resolvers

    register_resolvers(list_settings=help_lists_settings)
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # raise instead of printing several lines
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # read when torch is imported, which is later
    guarded = _Guarded(job)
    overrides: list[str] = []
    entry = hydra.main(version_base="1.3", config_path=str(config_dir()), config_name=config_name)(guarded)
    try:
        if not _COMPLETION.intersection(arguments):
            overrides, flags = _split(arguments, bare)
            page = [f"hydra/help={config_name}"] if (config_dir() / f"hydra/help/{config_name}.yaml").is_file() else []
            if any(override.startswith("+") for override in overrides):
                check_keys(config_name, overrides)
            sys.argv[1:] = [*_HYDRA, *page, *overrides, *flags]
        try:
            entry()
        except HydraException:
            if not guarded.has_begun:
                check_keys(config_name, overrides)
            raise
    except TerraError as error:
        _exit(str(error))
    except (HydraException, OmegaConfBaseException) as error:
        _exit(_one_line(error))
    except BrokenPipeError:
        if guarded.has_begun:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # whoever read the help page has seen enough
    except (ValueError, TypeError, OSError, RecursionError) as error:
        # Hydra's words for a group set to null or to a list, a name that is too long, and lists too deep; one of the
        # job's own is a bug and keeps its traceback.
        if guarded.has_begun:
            raise
        _exit(_one_line(error))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


class _Guarded:
    """A job whose errors exit at once, because Hydra would print lines of its own around them."""

    def __init__(self, job: Callable[["DictConfig"], None]) -> None:
        functools.update_wrapper(self, job)
        self._job = job
        self.has_begun = False

    def __call__(self, config: "DictConfig") -> None:
        from omegaconf.errors import OmegaConfBaseException

        self.has_begun = True
        try:
            self._job(config)
        except TerraError as error:
            _exit(str(error))
        except OmegaConfBaseException as error:
            _exit(_one_line(error))


def _overview() -> str:
    width = max(map(len, COMMANDS)) + 2
    lines = ["terra: autoregressive world models: record, train, generate, drive, measure.", ""]
    lines += ["USAGE", "  terra COMMAND [setting=value ...]", "  terra COMMAND --help [all]", "  terra --version", ""]
    for title, commands in GROUPS.items():
        lines += [title.upper(), *(f"  {each.name:{width}}{each.job}" for each in commands), ""]
    return "\n".join([*lines, "A first video: terra generate experiment=demo"])


def _without_all(arguments: Sequence[str]) -> tuple[list[str], bool]:
    """Arguments without the word "all" of `--help all`, which Hydra does not know, and whether it was there."""
    helps = [at for at in range(1, len(arguments)) if arguments[at] == "all" and arguments[at - 1] in ("-h", "--help")]
    return [argument for at, argument in enumerate(arguments) if at not in helps], bool(helps)


def _split(arguments: Sequence[str], bare: str = "") -> tuple[list[str], list[str]]:
    """Split arguments into settings and Hydra's options with values; arguments without a "=" make the setting `bare`.

    Raises ConfigError for an unknown option.
    """
    overrides: list[str] = []
    flags: list[str] = []
    names: list[str] = []
    for argument, before in zip(arguments, ["", *arguments], strict=False):
        name = argument.partition("=")[0]
        if before in _VALUED or name in _FLAGS:
            flags.append(argument)
        elif argument.startswith("-"):
            raise ConfigError(f"{argument}: no such option; settings are given as name=value, without dashes")
        elif argument.lstrip("+~").startswith(_FIXED) or (
            name.lstrip("+~") in _LOGGING and argument.partition("=")[2] not in _WITHOUT_FILE
        ):
            raise ConfigError(f"{name}: is fixed: nothing is written but what output= and other settings name")
        elif "=" in argument or argument.startswith("~"):
            overrides.append(argument)
        elif bare:
            quoted = argument.replace("'", r"\'")
            names.append(f"'{quoted}'")
        else:
            raise ConfigError(f"{argument}: expected setting=value")
    return overrides + ([f"{bare}=[{','.join(names)}]"] if names else []), flags


def _one_line(error: Exception) -> str:
    """Hydra's message without layout and search path: what is wrong, and the possible choices."""
    message = str(error).split("Config search path")[0]
    if choice := re.search(
        r"Could not find '(.+)/([^/']+)'\s+Available options in '[^']+':\s+(.+)", message, re.DOTALL
    ):
        group, name, known = choice[1], choice[2], choice[3].split()
        close = difflib.get_close_matches(name, known, n=1)
        there = f"there {'is' if len(known) == 1 else 'are'} {', '.join(known)}"
        hint = f"did you mean {close[0]}? {there[0].upper()}{there[1:]}" if close else there
        return f"{group}={name}: no such choice; {hint}"
    if present := re.search(r"An item is already at '([^']+)'", message):
        return f"+{present[1]}: the setting exists, so write {present[1]}=VALUE without +"
    if missing := re.search(r"Missing mandatory value: (\S+)", message):
        return f"{missing[1]}: expected a value, got nothing"
    if missing := re.search(r"Interpolation key '([^']+)' not found", message):
        return f"{missing[1]}: expected a value, which another setting refers to, got nothing"
    if error.__cause__ is not None:
        message += "\n" + str(error.__cause__).splitlines()[0]
    lines = [line.strip() for line in message.splitlines()]
    lines = [line for line in lines if line and not line.startswith(("full_key", "object_type"))]
    return " ".join(dict.fromkeys(lines))


def _exit(message: str) -> Any:
    """Print one line and exit with 2; what a name or a file brought in can't move the terminal's cursor."""
    line = " ".join(message.split())
    if len(line) > _LONGEST_LINE:
        line = f"{line[:_LONGEST_LINE]}... ({len(line)} characters)"
    shown = "".join(each if each.isprintable() else ascii(each)[1:-1] for each in line)
    print(f"error: {shown}", file=sys.stderr)
    sys.exit(2)
