"""Projects of these tests."""

from gitlab_ci_service import accepted_project, gitlab_ci_local, project

__all__ = ["accepted_project", "gitlab_ci_local", "project"]
