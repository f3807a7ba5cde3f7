"""The projects in here bring their own tests, which run where they are installed (see `test_thirdparty`)."""

collect_ignore = ["tiny_backend"]
