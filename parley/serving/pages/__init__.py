"""The web page of a server: its files, and the data of its status page."""
