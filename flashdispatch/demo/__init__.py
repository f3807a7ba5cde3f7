"""The main job on real input, for people to watch: ``flashdispatch demo``.

A pretrained sentence model with its attention replaced, a tiny language model trained through flashdispatch, and every
ready backend's error on the model's real Q, K and V. It needs the extra ``demo`` (transformers) and a package that
holds the model's weights, and no network. Importing this imports neither: they load when the demo runs.
"""

from flashdispatch.demo.errors import DemoFailedError, MissingPackageError
from flashdispatch.demo.show import run_demo

__all__ = ["DemoFailedError", "MissingPackageError", "run_demo"]
