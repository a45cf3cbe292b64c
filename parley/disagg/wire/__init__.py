"""The data that instances and coordinators exchange: PD headers, handovers, result frames, prompt hashes, roles."""
