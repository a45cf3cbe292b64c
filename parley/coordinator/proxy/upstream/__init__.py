"""The instances' side: connections to instances, their result streams, and requests that they answer by themselves."""
