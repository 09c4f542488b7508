"""The image of the Dockerfile, built from Debian packages and a folder of wheels: no registry takes part."""
