"""The interfaces of MindIE that generate: a file for each, with the members and replies that several share."""
