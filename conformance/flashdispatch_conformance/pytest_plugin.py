"""The suite as pytest items: ``pytest --pyargs flashdispatch_conformance --fd-backend NAME``. Inactive without it."""
