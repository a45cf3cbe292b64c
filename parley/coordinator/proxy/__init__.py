"""Carries requests to instances and results to clients, and resumes requests that lost their instance."""
