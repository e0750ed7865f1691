"""Images: ids for the rows of their features, what reads them, and the towers that compute
them."""
