{{/* settings.model as JSON, with the source from `model`. A model without a name has that of its source, as in quickstart. */}}
{{- define "hermes.model" -}}
{{- $model := .Values.settings.model | default dict -}}
{{- $source := $model.source | default .Values.model -}}
{{- merge (dict "source" $source "name" ($model.name | default (regexReplaceAll "[\\s:]+" (base $source) "-"))) $model | toJson -}}
{{- end }}

{{/* Where files are kept; empty for nowhere. */}}
{{- define "hermes.storage" -}}
{{- (.Values.settings.files | default dict).storage -}}
{{- end }}

{{/* Whether engines may ask the hub; empty if not. */}}
{{- define "hermes.hubAccess" -}}
{{- $isHubId := not (regexMatch "^(/|builtin:)" (include "hermes.model" . | fromJson).source) -}}
{{- if kindIs "bool" .Values.hub.access | ternary .Values.hub.access $isHubId }}true{{ end -}}
{{- end }}

{{/* The Serve config, as for `serve deploy`: the settings and the path of the API keys. It contains no secrets. */}}
{{- define "hermes.serveConfig" -}}
{{- $args := deepCopy .Values.settings -}}
{{- $_ := set $args "service" (include "hermes.service" .) -}}
{{- $_ := set $args "model" (include "hermes.model" . | fromJson) -}}
{{- if .Values.auth.enabled -}}
{{- $_ := set $args "auth" (dict "required" true "keys_file" "/etc/hermes/keys/keys") -}}
{{- end -}}
{{- if include "hermes.redisCa" . -}}
{{- $_ := set $args "redis" (merge (dict "ca_file" "/etc/hermes/redis/ca.crt") ($args.redis | default dict)) -}}
{{- end -}}
{{- /* Each kind of replica has a resource that only its own pods offer. Otherwise an ingress would take the CPUs of an engine
       that has not started yet, and, without GPUs, an engine those of an ingress: the last of either would wait for ever. */}}
{{- $_ := set $args "ingress" (merge (dict "ray_resource" "ingress") ($args.ingress | default dict)) -}}
{{- $_ := set $args "workers" (merge (dict "ray_resource" "engine") $args.workers) -}}
{{- $scaling := include "hermes.autoscaling" . | fromJson -}}
{{- if $scaling -}}
{{- $_ := set $args "workers" (set (omit $args.workers "autoscaling") "replicas" $scaling.min_replicas) -}}
{{- end -}}
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
    {{- if $scaling }}
    deployments: # Serve replaces every replica after a change of `args`, and none after a change here
      - name: Worker
        num_replicas: auto
        autoscaling_config:
          {{- toYaml $scaling | nindent 10 }}
    {{- end }}
{{- end }}
