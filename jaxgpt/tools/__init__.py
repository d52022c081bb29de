"""Programs that work on trained runs. Nothing else imports them, so each folder can be deleted."""
