"""A page to look at: which calls run, which were repeated, which were canceled. Needs no extra, and Flask.

app.register_blueprint(make_dashboard(guard=require_admin), url_prefix="/runonce")
"""

from .blueprint import make_dashboard

__all__ = ["make_dashboard"]
