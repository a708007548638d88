"""``ort_trainer`` in other libraries' training loops. Each module needs its library, so nothing is imported here."""
