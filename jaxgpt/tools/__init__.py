"""Programs that work on trained runs. Nothing else imports them; each folder can be deleted."""
