"""What is known about each setting, metric and foreign name: from the schema, the rules and the
documentation."""
