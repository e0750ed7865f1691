"""Where the models and engines of a run are built: in this process, in child processes, in those
of a launcher or in Ray's actors; all behind one port."""
