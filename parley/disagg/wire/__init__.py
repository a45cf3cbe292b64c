"""The data that instances and coordinators exchange: headers, result frames, prompt hashes, roles."""
