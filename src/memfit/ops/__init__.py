"""Plain torch maths that levers use; knows nothing of plans and budgets."""
