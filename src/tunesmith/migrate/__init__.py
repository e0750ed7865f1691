"""From other frameworks' scripts and configurations to run files. Nothing that is read here is run."""
