"""What was recorded, as tables for people and files for programs."""
