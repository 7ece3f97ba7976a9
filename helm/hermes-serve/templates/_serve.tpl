{{/* What `serve deploy` would get: the settings, and where the API keys lie. No secret goes through here. */}}
{{- define "hermes.serveConfig" -}}
{{- $args := deepCopy .Values.settings -}}
{{- if .Values.auth.enabled -}}
{{- $_ := set $args "auth" (dict "required" true "keys_file" "/etc/hermes/keys/keys") -}}
{{- end -}}
{{- if include "hermes.redisCa" . -}}
{{- $_ := set $args "redis" (merge (dict "ca_file" "/etc/hermes/redis/ca.crt") ($args.redis | default dict)) -}}
{{- end -}}
{{- /* Not on an engine's pod: it would take the CPUs of an engine that has still to come. */}}
{{- $_ := set $args "ingress" (merge (dict "ray_resource" "ingress") ($args.ingress | default dict)) -}}
proxy_location: EveryNode
http_options:
  host: 0.0.0.0
  port: 8000
logging_config:
  enable_access_log: false
applications:
  - name: hermes
    route_prefix: /
    import_path: serve_app.deploy:build
    args:
      {{- toYaml $args | nindent 6 }}
{{- end }}
