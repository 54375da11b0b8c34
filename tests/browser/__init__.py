"""What people see, in a browser: headless Chromium on pages that are served or opened from here."""
