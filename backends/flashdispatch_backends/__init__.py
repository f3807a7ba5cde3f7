"""The built-in backends. Each folder is one plugin, found by its entry point exactly like a third party's."""
