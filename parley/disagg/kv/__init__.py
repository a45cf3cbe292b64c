"""Transfer of KV pages between instances; start reading at ``peer``. Knows neither engines nor HTTP."""
