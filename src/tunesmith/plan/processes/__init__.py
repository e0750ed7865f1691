"""The processes of a run: their models, the devices they use, and their places on a cluster."""
