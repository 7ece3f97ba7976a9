{{/* How pods reach Redis: the chart's own, three with Sentinel, or one elsewhere. */}}

{{/* The Secret with Redis's passwords. */}}
{{- define "hermes.redisSecret" -}}
{{- range list "internal" "ha" "external" }}
{{- $redis := get $.Values.redis . }}
{{- if $redis.enabled }}{{ $redis.existingSecret | default (print (include "hermes.fullname" $) "-redis") }}{{ end -}}
{{- end }}
{{- end }}

{{/* The name, in the Secret, of the CA certificates for an external Redis; empty if there are none. */}}
{{- define "hermes.redisCa" -}}
{{- if .Values.redis.external.enabled }}{{ .Values.redis.external.caKey }}{{ end -}}
{{- end }}

{{/* A variable from Redis's Secret: (list $ "NAME" "entry") */}}
{{- define "hermes.fromRedisSecret" -}}
- name: {{ index . 1 }}
  valueFrom:
    secretKeyRef:
      name: {{ include "hermes.redisSecret" (index . 0) }}
      key: {{ index . 2 }}
{{- end }}

{{/* The URL of the service's Redis, with its password, which Kubernetes inserts when the container starts. */}}
{{- define "hermes.redisUrl" }}
{{- with .Values.redis }}
{{- if .internal.enabled }}
{{ include "hermes.fromRedisSecret" (list $ "HERMES_REDIS_PASSWORD" .internal.passwordKey) }}
- name: HERMES_REDIS_URL
  value: redis://hermes:$(HERMES_REDIS_PASSWORD)@{{ include "hermes.fullname" $ }}-redis:6379/0
{{- else if .ha.enabled }}
{{ include "hermes.fromRedisSecret" (list $ "HERMES_REDIS_PASSWORD" .ha.passwordKey) }}
{{ include "hermes.fromRedisSecret" (list $ "HERMES_SENTINEL_PASSWORD" .ha.sentinelPasswordKey) }}
- name: HERMES_REDIS_URL
  value: redis+sentinel://hermes:$(HERMES_REDIS_PASSWORD)@{{ include "hermes.sentinels" .ha }}/{{ .ha.primary }}/0?sentinel_password=$(HERMES_SENTINEL_PASSWORD)
{{- else }}
{{ include "hermes.fromRedisSecret" (list $ "HERMES_REDIS_URL" .external.urlKey) }}
{{- end }}
{{- end }}
{{- end }}

{{/* The addresses of the Sentinels of redis.ha: of each pod, the Service that has its name and a fixed address. */}}
{{- define "hermes.sentinels" -}}
{{- $sentinels := list -}}
{{- range $i := until (int .replicas) }}
{{- $sentinels = append $sentinels (printf "%s-announce-%d:26379" $.name $i) }}
{{- end -}}
{{ join "," $sentinels }}
{{- end }}

{{/* Address and login of Ray's GCS, by the names of variables. The GCS does not know Sentinel: HAProxy leads it to the primary; after
     a failover its connection ends, and the head starts again. */}}
{{- define "hermes.gcsLogin" -}}
{{- with .Values.redis }}
- name: HERMES_GCS_REDIS
  value: {{ .internal.enabled | ternary (print (include "hermes.fullname" $) "-redis:6379") (.ha.enabled | ternary (print .ha.name "-haproxy:6379") .external.gcsAddress) }}
{{- if .external.enabled }}
{{ include "hermes.fromRedisSecret" (list $ "HERMES_GCS_REDIS_USER" .external.gcsUsernameKey) }}
{{- else }}
- name: HERMES_GCS_REDIS_USER
  value: ray
{{- end }}
{{ include "hermes.fromRedisSecret" (list $ "HERMES_GCS_REDIS_PASSWORD" (.internal.enabled | ternary .internal.rayPasswordKey (.ha.enabled | ternary .ha.rayPasswordKey .external.gcsPasswordKey))) }}
{{- end }}
{{- end }}
