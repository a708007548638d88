"""``ort_trainer`` inside other libraries' training loops. Each module needs its library, so none is imported here."""
