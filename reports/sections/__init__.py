"""The sections of a report, one file each: `build(view, scope)` gives what every form renders."""
