"""Joins the rooms: from a step and a budget to a plan, from a plan to a proven step that runs inside it."""
