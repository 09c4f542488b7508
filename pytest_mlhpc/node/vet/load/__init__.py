"""The killable child: all of vetting that imports torch, or asks a driver to compute."""
