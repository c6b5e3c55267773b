"""The model as a service: video jobs over HTTP, live driving over WebSocket, and the page (see `terra.serving.app`)."""
