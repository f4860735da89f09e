"""Build servesim. With a C compiler, mypyc compiles the engine, the costs and the policies from their Python files.

    SERVESIM_PURE=1     do not compile; another value is the reason that `sim --version` shows
    SERVESIM_COMPILE=1  fail if the modules cannot be compiled

Without these variables a failed build installs plain Python, and `sim --version` shows the reason.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from setuptools import Distribution, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

MYPY = "mypy==2.4.1"
COMPILED = ("core/*", "engine/*", "costs/*", "policies/*", "policies/*/*", "routers/*", "runs/packed_requests")
INTERPRETED = (
    "__init__",
    "errors", "limits", "native",  # subclasses of built-in exceptions; rarely used; see its text
    "class_source", "class_table", "fields",  # read annotations and source files, once per class
    # read mappings and files, once per run
    "device_profile", "mapping", "named_profile", "profile", "profile_file", "terms", "uncertainty",
    "config_file", "export", "tuning", "vllm_flags",  # configurations of engines, read and written
    "blake3", "world",  # of keys; a subclass of a class of SimPy
    "kv_memory", "model_arithmetic", "model_config", "profile_verdict",  # used at most once per run
)  # fmt: skip
# What every step of a run calls. gcc takes twice as long with -O2 as with -Og, so all other modules have -Og.
OFTEN_CALLED = (
    "core/plan", "core/policy", "core/request", "core/view", "costs/derived", "costs/linear", "engine/acceptance",
    "engine/arrivals", "engine/block_tree", "engine/cache_draft", "engine/clients", "engine/cohort",
    "engine/draft_cohort", "engine/drafts", "engine/fleet", "engine/inbox", "engine/kv_cache", "engine/kv_use",
    "engine/loop", "engine/model_call", "engine/notices", "engine/plans", "engine/prefix_cache", "engine/queues",
    "engine/replica", "engine/rules", "engine/server", "engine/shape", "engine/simulated", "engine/state",
    "engine/step", "engine/stuck", "engine/waits", "policies/llm_serving/policy", "policies/sglang/policy",
    "policies/sglang/rules", "policies/vllm_v1/block_ring", "policies/vllm_v1/drafting", "policies/vllm_v1/policy",
    "policies/vllm_v1/rules", "policies/vllm_v1/speculation", "policies/vllm_v1/step_pass", "runs/packed_requests",
)  # fmt: skip
# mypy must not follow imports to the packages that only other modules need.
MYPY_CONFIG = """[mypy]
follow_imports = silent
ignore_missing_imports = true
[mypy-servesim.api,numpy.*,simpy.*]
follow_imports = skip
"""
REQUIRED = os.environ.get("SERVESIM_COMPILE", "") not in ("", "0")


def why_plain() -> str:
    """Return why the modules are not compiled, or an empty text if they are."""
    pure = os.environ.get("SERVESIM_PURE", "")
    if pure not in ("", "0"):
        return "SERVESIM_PURE was set" if pure == "1" else pure
    if sys.version_info < (3, 10):
        return "the compiler needs Python 3.10"
    compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
    if sys.platform != "win32" and shutil.which(compiler) is None:
        return "no C compiler found"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "the Python headers are missing: apt install python3-dev"
    return ""


class CompiledDistribution(Distribution):
    """A wheel for one platform. The list of its extension modules is made during the build."""

    def has_ext_modules(self) -> bool:
        return True


class ParallelBuild(build_ext):
    """Runs one C compiler per core, with flags for each file. setuptools compiles the files of a library one by one."""

    def build_extensions(self) -> None:
        compiler: Any = self.compiler
        if compiler.compiler_type == "unix":
            compile_files, header = compiler.compile, self.precompile_header()

            def compile_in_parallel(sources: list[str], *, extra_postargs: list[str], **options: Any) -> list[str]:
                def compile_one(file: str) -> str:
                    flags = [*extra_postargs, *header, *optimisation(file)]
                    return str(compile_files([file], extra_postargs=flags, **options)[0])

                largest_first = sorted(sources, key=os.path.getsize, reverse=True)
                with ThreadPoolExecutor(os.cpu_count()) as pool:
                    return list(pool.map(compile_one, largest_first))

            compiler.compile = compile_in_parallel
        super().build_extensions()

    def precompile_header(self) -> list[str]:
        """Return the flags to read the headers of all modules, 0.8 MB, from one file that gcc has parsed before."""
        compiler: Any = self.compiler
        version = subprocess.run([compiler.compiler_so[0], "--version"], capture_output=True, text=True)
        is_gcc = version.returncode == 0 and "Free Software Foundation" in version.stdout
        if not is_gcc:  # clang accepts such a file only with the same flags
            return []
        library, header = self.extensions[0], Path(self.build_temp) / "all_modules.h"
        header.write_text('#include "__native_compiled.h"\n#include "__native_internal_compiled.h"\n')
        folders = [f"-I{folder}" for folder in (*library.include_dirs, *compiler.include_dirs)]
        command = [*compiler.compiler_so, *folders, *library.extra_compile_args, "-x", "c-header", str(header)]
        compiler.spawn([*command, "-o", f"{header}.gch"])
        return ["-include", str(header)]


def optimisation(file: str) -> list[str]:
    """Return the flags of a C file: none for -O2, which mypyc passes already."""
    _, _, module = Path(file).stem.partition("servesim___")
    return [] if not module or module.replace("___", "/") in OFTEN_CALLED else ["-Og"]


class BuildPlain(build_py):
    """Copies the Python files and writes why they are not compiled."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            write_note(Path(self.build_lib) / "servesim", why_plain())


class BuildCompiled(build_ext):
    """Compiles the Python files that `build_py` has copied, so that the names of modules follow from their paths."""

    def run(self) -> None:
        if self.inplace or self.editable_mode:
            return  # a changed file must have an effect at once
        package, temp = Path(self.build_lib).resolve() / "servesim", Path(self.build_temp).resolve()
        try:
            self.compile(package, temp)
        except (Exception, SystemExit) as error:  # mypyc exits if it finds an error
            if REQUIRED:
                raise
            for file in package.parent.rglob(f"*{sysconfig.get_config_var('EXT_SUFFIX')}"):
                file.unlink()
            print(f"servesim is not compiled: {error!r}", file=sys.stderr)
            write_note(package, "the build failed; SERVESIM_COMPILE=1 pip install . shows the error")

    def compile(self, package: Path, temp: Path) -> None:
        """Translate the modules to C and compile them."""
        from mypyc.build import mypycify

        temp.mkdir(parents=True, exist_ok=True)
        config = temp / "mypy.ini"
        config.write_text(MYPY_CONFIG, encoding="utf-8")
        folder = Path.cwd()
        os.chdir(package.parent)
        try:
            self.distribution.ext_modules = mypycify(
                ["--config-file", str(config), "--cache-dir", str(temp / "mypy_cache"), *compiled_files(package)],
                opt_level="2", debug_level="0", multi_file=True, group_name="servesim.compiled", target_dir=str(temp),
            )  # fmt: skip
            for module in self.distribution.ext_modules:
                module.include_dirs.append(str(temp / "servesim"))  # mypyc writes the headers of a dotted group there
                if sys.platform == "linux":  # calls go through no table; a*b+c is rounded as in plain Python
                    flags = ["-fvisibility=hidden", "-fno-plt", "-ffp-contract=off"]
                    module.extra_compile_args = [*module.extra_compile_args, *flags]  # the modules share one list
            build = ParallelBuild(self.distribution)
            build.build_lib, build.build_temp, build.parallel = str(package.parent), str(temp), os.cpu_count()
            build.ensure_finalized()
            build.run()
        finally:
            os.chdir(folder)


def compiled_files(package: Path) -> list[str]:
    """Return the files to compile, relative to the folder of the package."""
    files = [file for pattern in COMPILED for file in sorted(package.glob(f"{pattern}.py"))]
    return [str(file.relative_to(package.parent)) for file in files if file.stem not in INTERPRETED]


def packages() -> list[str]:
    """Return the packages: the folders with an `__init__.py`. The folder sim/ is the package `servesim` itself."""
    tops = ("sim", "policies", "routers", "calibrate", "traces")
    folders = [file.parent for top in tops for file in sorted(Path(top).rglob("__init__.py"))]
    return [".".join(("servesim", *folder.parts)).replace("servesim.sim", "servesim", 1) for folder in folders]


def write_note(package: Path, text: str) -> None:
    """Write why the installation is plain Python; `sim --version` shows it."""
    (package / "plain.txt").write_text(text + "\n", encoding="utf-8")


reason = why_plain()
if reason and REQUIRED:
    sys.exit(f"SERVESIM_COMPILE is set, but servesim cannot be compiled: {reason}")
if reason:
    setup(packages=packages(), cmdclass={"build_py": BuildPlain})
else:
    setup(
        packages=packages(),
        distclass=CompiledDistribution,
        cmdclass={"build_ext": BuildCompiled},
        setup_requires=[MYPY],
    )
