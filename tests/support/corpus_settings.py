"""Hostile settings, output folders and manifests."""

import json
import os
import random
from collections.abc import Callable
from typing import Any

from corpus import Case, Make, Place, grow


def cases(rng: random.Random) -> list[Case]:
    return [*settings(), *outputs(), *manifests(rng)]


def settings() -> list[Case]:
    made: list[Case] = []
    refused = """
        seed=-1; seed=9223372036854775808; seed=1e3; seed=1.0; seed=true; seed=null; seed=[1]; seed={a:1}; seed='7'; seed=\u0667; seed=nan; seed=-0.0
        seed=${seed}; seed=${oc.env:HOME}; seed=${terra_demo:x}; seed=1,2; seed=range(1,3); seed=choice(1,2); seed=interval(0,1); seed=glob(*)
        temperature=0.5; sampling.temperature=true; sampling.temperature=-1; sampling.temperature=nan; sampling.temperature=inf; sampling.temperature=1e400
        sampling.temperature=null; sampling.temperature=hot; sampling.temperature=[1]; sampling.temperature=101; sampling.top_k=1.5; sampling.top_k=-1; sampling.top_k=true
        sampling.top_k=null; sampling.top_k='7'; sampling.top_p=0; sampling.top_p=1.5; sampling.top_p=nan; sampling.top_p=true; sampling.top_p=-0.0
        sampling=nosuch; sampling=null; sampling=[greedy]; sampling={}; sampling=../model/demo; sampling=/etc/passwd; +sampling.min_p=0.1; ~sampling; ~sampling.top_k
        +foo=1; +sampling.foo=1; ++foo=1; ~seed; ~context; ~engine; ~foo; ~num_frames=25; +seed=3; foo=1; sed=7; foo.bar=1; +foo.bar=1; engine.foo=1; +engine.foo=1
        engine=nosuch; engine=null; engine=[]; engine=../model/demo; engine._target_=os.system; engine._target_=builtins.eval; engine._target_=subprocess.call
        engine._target_=null; engine._target_=7; engine._target_=''; engine._target_=.; engine._target_=a..b; engine._target_=os.path.join; engine._target_=terra
        engine._target_=sys.exit; engine._target_=os._exit; engine._target_=breakpoint; engine._target_=input; engine._target_=antigravity.x; engine._target_=this.x
        engine._target_=terra.generate.run; engine._target_=builtins.dict; engine._target_=print; engine._target_=shutil.rmtree; engine._target_=pathlib.Path
        +engine._args_=[1]; +engine._convert_=all; +engine._partial_=true; +engine._recursive_=true; +engine.checkpoint=x; engine={_target_:os.system,command:id}
        decoder=nosuch; decoder=refiner; decoder._target_=os.system; decoder._target_=builtins.print; decoder.dtype=int8; decoder.dtype=null_; decoder.compiled=7; decoder.compiled=maybe
        decoder={_target_:os.system}; device=tpu; device=cuda:99; device=cuda; device=7; device=true; device=[cpu]; device=meta; device=mps; device=cpu:x; device=''; device='cpu\\nx'
        dtype=float64; dtype=int8; dtype=float8; dtype=torch.float32; dtype=7; dtype=true; dtype=[float32]; overlap=0; overlap=-1; overlap=8; overlap=1e9; overlap=1000000000; overlap=null; overlap=true
        overwrite=7; overwrite=maybe; overwrite=null; overwrite='true'; png=7; png=null; png=[]; num_context=true; num_frames=true; num_frames=4.0; num_frames=1_000_000_000; num_frames=1000000000
        num_frames=99999999999999999999; num_frames=${num_context}x; num_context=9; num_context=null; num_context='3'; num_frames=[4]; num_frames=
        camera=nosuch; camera=null; camera.fov_degrees=0; camera.fov_degrees=180; camera.fov_degrees=nan; camera.fov_degrees=1e400; camera.height_meters=-1; camera.height_meters=true; camera.height_meters=abc
        camera.pitch_radians=nan; camera.pitch_radians=1e308; camera.fov_degrees=null; +camera.x=1; camera={}; camera=[1]
        context=null; context=[a,b]; context={a:b}; context=7; context=true; context=; context='${oc.env:HOME}/nothing'; context=${oc.env:NOSUCH}; context=${oc.decode:x}; context=${context}; context=${a.b}
        context='${oc.create:{a:1}}'; context=${hydra:runtime.cwd}/x; context=${now:%Y}x; context=???; trajectory=null; trajectory=[a]; trajectory={a:b}; trajectory=true; trajectory=; trajectory=${trajectory}
        trajectory=${output}; trajectory=${oc.env:PATH}; trajectory=???; sample_id=7; sample_id=true; sample_id=[1]; sample_id=1.5
        model=nosuch; model=folder; model=null; model=../engine/hf; +model.path=x; model=terra_v1; model.path=/; model={path:x}; tokenizer=terra; world_model=terra; tokenizer=null; tokenizer=[]
        tokenizer.revision=main; tokenizer.subfolder=../..; tokenizer.device=tpu; world_model.revision='; id'; tokenizer.subfolder='a\\0b'; +tokenizer.trust_remote_code=true; tokenizer.pretrained={}
        experiment=nosuch; experiment=../../etc/passwd; experiment=[demo,demo]; hydra=x; hydra.run.dir=elsewhere; hydra.output_subdir=here; hydra/launcher=submitit; hydra/sweeper=ax; hydra/launcher=nosuch
        hydra.job.chdir=true; hydra.mode=MULTIRUN; hydra.sweep.dir=x; +hydra.foo=1; hydra.job.name=../x; hydra/job_logging=default; hydra.verbose=true; hydra.searchpath=[file:///tmp]; hydra.hydra_logging.version=9
        hydra.callbacks.a._target_=os.system; +hydra.callbacks.a._target_=os.system; hydra.launcher._target_=os.system; hydra.job.env_set.PATH=x; +hydra.job.env_set.LD_PRELOAD=x; hydra.job.config.override_dirname.kv_sep=x
        memory=-1; memory=1; memory=1.5; memory=true; memory=null; memory=all; memory=[0]; map=7; map=nothing.csv; map=[a]; map_pose=[0,0,0]; map_pose=7; map_pose=[1,nan,0]; limits.map_frames=0
        --foo; --config-dir=/tmp; --config-name=serve; --config-path=/etc; -m; --multirun; --multirun seed=1,2; --package=x; --info; --info=all; --run; --resolve; -cn=x; --experimental-rerun=x; --shell-completion; -sc install=bash; --
        =; =1; a=; a; 'a b=1'; a==b; seed==1; seed=1=2; seed 7; @model=demo; model@x=demo; seed:=7; seed=[; seed={; seed='; seed="; seed=(; seed=\\; seed=$; seed=${; seed=${${seed}}; seed=#; seed=%s; seed=; *=1; [0]=1; a[0]=1; .=1; ..=1; a..b=1
        \u0661=2; s\u0435ed=7; seed=7\u200b; \ufeffseed=7; seed=\u202e7; seed=\x1b[31m7; limits.json_bytes=0; limits.json_bytes=-1; limits.json_bytes=99999999999999999999; limits.manifest_bytes=1e9; limits.video_fps=1e300; limits.context_seconds=1e300; limits.header_bytes=1; limits.tensors=1; limits.json_depth=1000000000000; limits.nosuch=1; +limits.nosuch=1; limits=null; limits=7; engine.drafts=7
    """
    texts = [text for line in refused.strip().splitlines() for text in line.strip().split("; ")]
    for text in dict.fromkeys(texts):
        # Hydra's own settings and options may be harmless, and what is merged with {} or taken away is the default.
        fixed = text.startswith(("hydra.run", "hydra.output_subdir", "hydra/job_logging", "--experimental"))
        harmless = (
            (text.lstrip("+").startswith(("hydra", "--", "-sc")) and not fixed)
            or text in ("sampling=[greedy]", "experiment=[demo,demo]")  # a list of one choice is Hydra's own
            or text.endswith("={}")
            or text == "~sampling.top_k"
        )
        must = None if harmless else "refuse"
        make: Make = lambda place, t=text: t.split(" ") if t.startswith("-") else [t]  # noqa: E731
        sweeps = text.startswith(("-m", "--multirun", "hydra.mode"))
        made.append(Case("settings", text, make, must=must, outputs=("out", "multirun") if sweeps else ("out",)))
    # Accepted or refused: both are right, and nothing else is.
    for text in (
        "seed=0x10", "seed=0b1", "seed=1_0", "seed=007", "seed=+7", "seed=-0", "seed=' 7'", "seed=9223372036854775807", "sampling.temperature=0", "sampling.temperature=-0.0",
        "sampling.temperature=1e-300", "sampling.temperature=1e-39", "sampling.temperature=100", "sampling.top_k=9223372036854775807", "sampling.top_k=99999999999999999999", "sampling.top_p=1e-300",
        "sampling=greedy", "engine=jacobi", "engine=hf", "engine=auto", "engine=graph", "device=cpu", "device=cpu:0", "device=CPU", "dtype=float32", "dtype=float16", "dtype=bfloat16",
        "overlap=1", "overlap=7", "overwrite=true", "png=true", "num_frames=3", "num_frames=2", "num_context=1", "num_context=2", "camera.fov_degrees=179.999", "camera.fov_degrees=1e-300",
        "camera.height_meters=1e300", "camera.height_meters=1e-300", "camera.pitch_radians=100", "camera.pitch_radians=-1.57", "++seed=7", "++sampling.top_k=3", "sample_id=null", "sampling={temperature:0.5}",
        "tokenizer.device=cpu", "experiment=null", "experiment=demo", "decoder.dtype=float32", "--help", "--hydra-help", "--version", "--cfg=job", "-c job", "--cfg job --resolve", "--info config", "--help --version",
        "engine.device=cpu", "engine=jacobi engine.drafts=0", "engine=jacobi engine.drafts=-1", "engine=jacobi engine.drafts=1000000000", "engine=jacobi engine.drafts=1e9", "engine=jacobi engine.dtype=float16",
        "engine=hf engine.dtype=int8", "engine=jacobi engine.device=cuda", "engine=graph engine.max_sessions=0", "engine=graph engine.max_sessions=1000000000", "engine=jacobi +engine.nosuch=1",
    ):  # fmt: skip
        made.append(
            Case(
                "settings", f"perhaps {text}", lambda place, t=text: t.split(" ") if " " in t and "'" not in t else [t]
            )
        )

    def add(name: str, make: Make, must: str | None = "refuse", remove: tuple[str, ...] = ()) -> None:
        made.append(Case("settings", name, make, must=must, remove=remove))

    add("seed twice", lambda place: ["seed=1", "seed=2"], None)
    add("engine twice", lambda place: ["engine=hf", "engine=persistence"], None)
    add("output twice", lambda place: ["output=a", "output=out"], None)
    add("added twice", lambda place: ["++seed=1", "~seed"])
    add("5,000 settings", lambda place: [f"seed={i}" for i in range(5_000)], None)
    add("20,000 added", lambda place: [f"+a{i}=1" for i in range(20_000)])
    add("a long setting", lambda place: ["seed=" + "1" * 100_000])
    add("a long key", lambda place: ["a" * 100_000 + "=1"])
    add("a long like key", lambda place: ["seed" * 25_000 + "=1"])
    add("deep key", lambda place: ["a." * 5_000 + "a=1"])
    add("deep list", lambda place: ["seed=" + "[" * 3_000 + "]" * 3_000])
    add("deep interpolation", lambda place: ["seed=" + "${" * 500 + "seed" + "}" * 500])
    add("deep object", lambda place: ["seed=" + "{a:" * 1_000 + "1" + "}" * 1_000])
    add("functions", lambda place: ["seed=" + "int(" * 500 + "1" + ")" * 500])
    add("range of 1e12", lambda place: ["seed=range(1000000000000)"])
    add("sort of a list", lambda place: ["seed=sort(" + ",".join("9" * 2000) + ")"])
    add("NUL", lambda place: ["seed=7\0"])
    add("surrogate", lambda place: ["context=a\udcff"])
    add("nothing", lambda place: [], remove=("context", "trajectory"))
    add("no context", lambda place: [], remove=("context",))
    add("no trajectory", lambda place: [], remove=("trajectory",))
    add("config dir", lambda place: ["--config-dir", str(_hydra_folder(place)), "engine=evil"], None)
    add("config dir group", lambda place: ["--config-dir", str(_hydra_folder(place)), "experiment=evil"], None)
    add("conf here", lambda place: [f"hydra.searchpath=[file://{_hydra_folder(place)}]", "engine=evil"], None)
    return made


def _hydra_folder(place: Place) -> object:
    place.write("conf/engine/evil.yaml", "_target_: os.system\ncommand: touch evil\n")
    place.write(
        "conf/experiment/evil.yaml", "# @package _global_\nengine:\n  _target_: os.system\n  command: touch evil\n"
    )
    return place.inputs / "conf"


def outputs() -> list[Case]:
    made: list[Case] = []

    def add(
        name: str,
        make: Make,
        must: str | None = "refuse",
        outputs: tuple[str, ...] = ("out",),
        command: str = "generate",
    ) -> None:
        made.append(
            Case(
                "outputs",
                f"{name} {command}" if command != "generate" else name,
                make,
                command=command,
                must=must,
                outputs=outputs,
            )
        )

    def place_case(
        name: str,
        prepare: Callable[[Place], object],
        *settings: str,
        must: str | None = "refuse",
        outputs: tuple[str, ...] = ("out",),
    ) -> None:
        def make(place: Place) -> list[str]:
            prepare(place)
            return list(settings)

        for command in ("generate", "rollout"):
            add(name, make, must, outputs, command)

    for name, value in {
        "dot": ".", "two dots": "..", "root": "/", "proc": "/proc/x", "sys": "/sys/x", "dev": "/dev/null", "dev full": "/dev/full", "below dev null": "/dev/null/x", "fd": "/dev/fd/1", "stdout": "/dev/stdout",
        "empty": "", "slash": "a/", "null": "null", "long": "a" * 300, "long path": "a/" * 2_500 + "b", "newline": "'a\\nb'", "list": "[a]", "object": "{a:b}", "true": "true", "tilde": "~/terra-hostile-out",
        "surrogate": "a\udcff", "nul": "'a\\0b'", "ansi": "\x1b[31m", "env": "${oc.env:NOSUCH}", "env known": "${oc.env:TERRA_HOSTILE}", "itself": "${output}", "context": "${context}", "trajectory": "${trajectory}", "dash": "-out",
        "climbs": "x/../../case/out", "dots inside": "./out/.", "space": "' '", "bytes 255": "a" * 255, "bytes 250": "a" * 250, "unicode 200": "\u00e4" * 200, "emoji": "\U0001f697" * 60, "number": "7", "now": "${now:%Y}", "colon": "a:b", "percent": "%s", "deep": "a/b/c/d/e/f",
    }.items():  # fmt: skip
        made_names = {
            "number": ("7",),
            "slash": ("a",),
            "now": ("*",),
            "percent": ("%s",),
            "dash": ("-out",),
            "deep": ("a",),
            "emoji": ("*",),
            "colon": ("*",),
            "unicode 200": ("*",),
            "bytes 250": ("*",),
            "bytes 255": ("*",),
            "newline": ("*",),
            "ansi": ("*",),
            "space": ("*",),
            "surrogate": ("*",),
            "env known": ("out",),
            "climbs": ("out", "x"),
            "true": ("*",),
            "nul": ("*",),  # no NUL, but a backslash and a zero
            "dot": ("*",),  # a folder of rollouts may be the empty one at hand
        }.get(name, ("out",))
        place_case(f"to {name}", lambda place: None, f"output={value}", must=None, outputs=made_names)
    place_case("is a file", lambda place: (place.work / "out").write_text("mine"))
    place_case("below a file", lambda place: (place.work / "out").write_text("mine"), "output=out/below")
    place_case("is a FIFO", lambda place: os.mkfifo(place.work / "out"))
    place_case("dangling", lambda place: (place.work / "out").symlink_to("nothing"))
    place_case("loop", lambda place: (place.work / "out").symlink_to("out"))
    place_case(
        "link to a file", lambda place: ((place.work / "mine").write_text("x"), (place.work / "out").symlink_to("mine"))
    )
    place_case("parent dangling", lambda place: (place.work / "up").symlink_to("nothing"), "output=up/out")
    place_case(
        "somebody's", lambda place: ((place.work / "out").mkdir(), (place.work / "out/thesis.tex").write_text("mine"))
    )
    place_case(
        "somebody's, overwrite",
        lambda place: ((place.work / "out").mkdir(), (place.work / "out/thesis.tex").write_text("mine")),
        *("overwrite=true",),
    )
    place_case(
        "hidden file in it, overwrite",
        lambda place: ((place.work / "out").mkdir(), (place.work / "out/.git").write_text("mine")),
        "overwrite=true",
    )
    place_case(
        "link to somebody's, overwrite",
        lambda place: (
            (place.work / "mine").mkdir(),
            (place.work / "mine/thesis.tex").write_text("mine"),
            (place.work / "out").symlink_to("mine"),
        ),
        "overwrite=true",
    )
    for name, file, content in (
        ("own file among frames", "frames/thesis.txt", "mine"),
        ("own frames", "frames/frame_0000.png", "mine"),
        ("own video", "video.mp4", "mine"),
        ("folder with the name of a video", "video.mp4/thesis.txt", "mine"),
        ("record of another program", "rollout.json", '{"format": "theirs"}'),
        ("record that is none", "rollout.json", "mine"),
    ):
        add(f"{name}, overwrite", lambda place, f=file, c=content: _somebodys(place, f, c))
    for name, target in {
        "context": "context",
        "trajectory": "drive.json",
        "world model": "world_model",
        "tokenizer": "tokenizer",
        "all": ".",
    }.items():
        for overwrite in ("true", "false"):
            add(
                f"over the {name}, overwrite={overwrite}",
                lambda place, t=target, o=overwrite: {"output": place.common / t, "overwrite": o},
            )
        add(f"over the {name}", lambda place, t=target: {"output": place.common / t}, command="rollout")
        add(f"over a link to the {name}", lambda place, t=target: _linked(place, t))
        add(
            f"into the {name}",
            lambda place, t=target: {"output": place.common / t / "context" / ".." / "context", "overwrite": "true"},
        ) if name == "all" else None
    add("the folder of the command, overwrite", lambda place: {"output": place.work, "overwrite": "true"})
    add("a parent of the context, overwrite", lambda place: {"output": place.common, "overwrite": "true"})
    add("home, overwrite", lambda place: ["output=${oc.env:HOME}", "overwrite=true"])
    return made


def _somebodys(place: Place, file: str, content: str) -> dict[str, object]:
    path = place.work / "out" / file
    path.parent.mkdir(parents=True)
    path.write_text(content)
    return {"overwrite": "true"}


def _linked(place: Place, target: str) -> dict[str, object]:
    link = place.inputs / "link"
    link.symlink_to(place.common / target)
    return {"output": link, "overwrite": "true"}


def manifests(rng: random.Random) -> list[Case]:
    made: list[Case] = []
    line: dict[str, Any] = {"id": "a", "context": "{common}/context", "trajectory": "{common}/drive.json"}

    def add(name: str, content: Any, must: str | None = None, **more: Any) -> None:
        def make(place: Place) -> dict[str, object]:
            if callable(content):
                return {"manifest": content(place)} | more
            text = (
                content
                if isinstance(content, str | bytes)
                else "\n".join(json.dumps(each) if isinstance(each, dict) else each for each in content)
            )
            if isinstance(text, str):
                text = text.replace("{common}", str(place.common))
            return {"manifest": place.write("manifest.jsonl", text)} | more

        made.append(Case("manifests", name, make, command="rollout", must=must))

    plain = json.dumps(line)
    add("whole", plain, "accept")
    add("empty", b"", "refuse")
    add("blank lines", lambda place: place.write("m", "\n" * 3_000_000), "refuse")
    add("BOM", "\ufeff" + plain)
    add("UTF-16", plain.encode("utf-16"), "refuse")
    add("NULs", plain + "\0\n")
    add("CR", plain + "\r" + plain.replace('"a"', '"b"'))
    add("a list", f"[{plain}]")
    add("id twice", [line, line], "refuse")
    add("id twice apart", [line, *({**line, "id": f"x{i}", "num_frames": 0} for i in range(200)), line], "refuse")
    for name, value in {
        "climbs": "../../x",
        "slash": "a/b",
        "nul": "a\0",
        "long": "a" * 5_000,
        "dot": ".",
        "hidden": ".a",
        "number": 7,
        "float": 1.5,
        "true": True,
        "null": None,
        "list": ["a"],
        "huge": 10**400,
        "plus": "a+1",
        "newline": "a\n",
        "device": "con",
        "unicode": "\u0661",
        "empty": "",
    }.items():
        add(f"id {name}", [{**line, "id": value}])
    for key, values in {
        "num_frames": (0, -1, 1.5, True, "4", None, 10**9, 10**30, [4]), "num_context": (0, 10**9, None, "3", 5), "seed": (-1, 2**63, 2**63 - 1, 1.0, True, "7", None, [1]),
        "num_samples": (0, -1, 10**9, 10**18, True, 1.5, None), "sampling": (7, "greedy", [], {"top_k": 2.5}, {"top_k": True}, {"temperature": "hot"}, {"foo": 1}, {"temperature": None}, {"top_p": 1e-300}, {"temperature": 10**400}),
        "sample_id": (True, 1.5, [1], {}, "x" * 100_000), "context": ("", None, 7, [], "/dev/zero", "a\0b", "~", "**/*", "a" * 5_000, "/proc/self/mem"), "trajectory": ("", None, 7, [], "/dev/zero", "a\0.json", "a" * 5_000, "x" * 300 + ".json"),
        "context_frames": (["a.png"], [], "a.png", [None]), "instruction_trajs": ([], [[]], None, "x", [[[1e308, 0, 0]] * 60] * 2), "extra": (1,),
    }.items():  # fmt: skip
        for number, value in enumerate(values):
            add(f"{key} {number}", [{**line, key: value}])
            if number % 3 == 0:
                add(
                    f"{key} {number} of several",
                    [{**line, "id": "first"}, {**line, "id": "bad", key: value}, {**line, "id": "last"}],
                )
    add(
        "frames 100,000",
        [
            {key: value for key, value in line.items() if key != "context"}
            | {"context_frames": ["{common}/context/0.png"] * 100_000}
        ],
    )
    add("deep", '{"id": ' + "[" * 100_000)
    add("deep later", [line, '{"id": "b", "sampling": ' + "[" * 5_000 + "]" * 5_000 + "}"])
    add("digits", plain[:-1] + ', "seed": ' + "9" * 6_000 + "}")
    add("keys", "{" + ", ".join(f'"k{i}": 1' for i in range(60_000)) + ', "k1": 2}')
    add("surrogate", plain.replace('"a"', '"\\ud800"'))
    add("surrogate path", plain.replace("{common}/context", "\\ud800"))
    add("key twice", plain[:-1] + ', "id": "b"}')
    add("300 bad lines", "{}\n" * 300)
    add("100,000 of one", [{**line, "num_samples": 100_000, "num_frames": 0}])
    add("a line of 300 MB", lambda place: place.sparse("manifest.jsonl", 300 << 20, b'{"id": "a", '))
    add("1 TB", lambda place: place.sparse("manifest.jsonl", 1 << 40, b"{"))
    add("FIFO", lambda place: (os.mkfifo(place.inputs / "m"), place.inputs / "m")[1], "refuse")
    add("zero", lambda place: ((place.inputs / "m").symlink_to("/dev/zero"), place.inputs / "m")[1], "refuse")
    add("loop", lambda place: ((place.inputs / "m").symlink_to("m"), place.inputs / "m")[1], "refuse")
    add("folder", lambda place: place.inputs, "refuse")
    add(
        "grows",
        lambda place: (place.write("m", plain.replace("{common}", str(place.common)) + "\n"), grow(place.inputs / "m"))[
            0
        ],
    )
    for text in ("at_once=0", "at_once=1000000000", "workers=0", "workers=1000000", "contexts=0", "contexts=-1", "retries=-1", "retries=1000000000", "retry_seconds=-1", "retry_seconds=nan", "retry_seconds=1e300", "num_samples=0", "num_samples=1000000000000",
                 "on_change=nosuch", "on_change=null", "grid=7", "score=os:system", "score=builtins:eval", "score=nosuch", "score=os.path:join", "score=7", "metrics=/dev/full", "metrics=.", "metrics=/nosuch/x", "metrics=7", "cluster=nosuch", "context_root=/nosuch", "context_root=/dev/zero",
                 "context_root=", "seed=9223372036854775808", "num_frames=1000000000", "num_frames=true", "+nosuch=1", "sampling.top_k=2.5", "sampling.temperature=true", "manifest=", "manifest=null", "manifest=[a]", "manifest=~", "cluster.workers=0", "hydra.run.dir=x", "output="):  # fmt: skip
        made.append(
            Case("manifests", f"setting {text}", lambda place, t=text: [t], command="rollout", outputs=("out", "7"))
        )
    data = plain
    for number in range(10):
        at = rng.randrange(len(data))
        add(f"byte {number}", data[:at].replace("{common}", "{common}") + chr(rng.randrange(1, 128)) + data[at + 1 :])
    return made
