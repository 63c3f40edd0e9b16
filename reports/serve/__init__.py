"""The pages and a JSON API from a store that is only read: an ASGI application for one process behind one socket."""

from __future__ import annotations
