"""Projects of these tests."""

from gitlab_ci_service import gitlab_ci_local, project

__all__ = ["gitlab_ci_local", "project"]
