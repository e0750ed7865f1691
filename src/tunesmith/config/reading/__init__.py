"""What is checked before the sections see a run file, and errors that name each value's place and what it may be."""
