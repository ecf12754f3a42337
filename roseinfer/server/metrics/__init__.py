"""What the server counts of texts and of requests, and the page that shows it to Prometheus."""
