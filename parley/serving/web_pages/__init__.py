"""Pages of a server: the files of its web page, the data of its status page, and its metrics."""
